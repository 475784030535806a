"""Accounts of prompt tokens: how many were cached, loaded, or computed and why, by request.

         admit: nothing to load
 WAITING ────────────────────────────────────────────► SETTLED ──► the record
  │  ▲  └──── admit: tokens to load ────► LOADING ──────▲  admit: the load has ended
  │  └────── look: nothing came of it ──────┘ │
  └──────────────────── close ────────────────┴─► the record, what was not settled is ABORTED

vLLM asks for a request's chunks until there is an answer (`look`, then lookups), gives it blocks
(`admit`), and, if something was loaded, gives it its turn later (`admit` again). What comes after
that, pre-emptions for example, changes nothing any more: its first prefill is what counts.

Threads: `take_records` alone may run on another thread.

Invariant: in each record, prompt = own + loaded + the sum of missed, and none is negative.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice

from raykv.base.ids import Key, MissReason, shown_id
from raykv.engine.remote import take
from raykv.engine.requests import Miss
from raykv.protocol.engine import CHUNK_NAME_BYTES, MAX_NAMES_BYTES, MissRecord, Parting

MAX_WAITING = 1024
"""Records that wait to be sent; beyond it the oldest are lost, and remain in the counters."""

MAX_RECORDS = 128
"""Records in one message: some 20 KiB, and their chunks' names."""


MAX_NAMED = 2048
"""Chunks of one request that are named: that takes 0.2 ms of vLLM's scheduler."""


class MissStage(Enum):
    """How far a request has come."""

    WAITING = "waiting"
    LOADING = "loading"
    SETTLED = "settled"


@dataclass(slots=True)
class TokenAccount:
    """The account of one request, in tokens.

    `own`: in vLLM's cache. `loaded`: is being loaded, or was. `fetched`: of those, what another
    node had, and `disk` what a disk had. `failed`: should have been, but was not. `miss`: what the
    lookups found missing first; `otherwise` is the reason if they did not.
    """

    prompt: int
    tokens_per_chunk: int
    own: int = 0
    loaded: int = 0
    fetched: int = 0
    disk: int = 0
    failed: int = 0
    stage: MissStage = MissStage.WAITING
    miss: Miss | None = None
    otherwise: MissReason = MissReason.OTHER
    failure: MissReason | None = None
    tenant: str = ""
    ignored: dict[str, str] = field(default_factory=dict)

    def look(self, own: int, otherwise: MissReason) -> None:
        """Lookups begin: an earlier load, if any, has failed as a whole."""
        if self.stage is not MissStage.SETTLED:
            self.stage = MissStage.WAITING
            self.own, self.loaded, self.failure = min(own, self.prompt), 0, None
            self.fetched = self.disk = 0
            self.otherwise = otherwise

    def admit(self, computed: int, external: int, miss: Miss | None) -> None:
        """The request got blocks.

        Args:
            computed: tokens that vLLM counts as computed; 0 when lookups have just been made.
            external: tokens to be loaded now.
            miss: what these lookups found missing.
        """
        if self.stage is MissStage.WAITING:
            self.miss = miss
            self.loaded = min(external, self.prompt - self.own)
            self.stage = MissStage.LOADING if external else MissStage.SETTLED
        elif self.stage is MissStage.LOADING:
            if self.failure is not None:
                came = min(self.loaded, max(0, computed - self.own))
                self.failed, self.loaded = self.loaded - came, came
            self.stage = MissStage.SETTLED

    def produce(self) -> None:
        """The request has its first token: loads that it did not wait for have come."""
        if self.stage is MissStage.LOADING and self.failure is None:
            self.stage = MissStage.SETTLED

    @property
    def asked_for(self) -> int:
        """Tokens that should have been loaded, with those that failed."""
        return self.loaded + self.failed

    def missed(self) -> dict[MissReason, int]:
        """Count the tokens that were not loaded, by reason."""
        rest = self.prompt - self.own - self.loaded
        if self.stage is not MissStage.SETTLED:
            return _positive({MissReason.ABORTED: self.prompt - self.own})
        rest -= self.failed
        reason = self.otherwise if self.miss is None else self.miss.reason
        # A window, or a recurrent state, is not loaded up to the prompt's last token.
        is_end = reason is MissReason.OTHER and rest <= self.tokens_per_chunk
        end = rest if is_end else min(rest, self._unloadable())
        found: Counter[MissReason] = Counter()
        found[MissReason.INCOMPLETE_CHUNK] += end
        known = 0
        if self.miss is not None:
            known = min(rest - end, self.miss.known_tokens)
            found[self.miss.known_reason] += known
        found[reason] += rest - end - known
        found[self.failure or MissReason.LOAD_FAILED] += self.failed
        return _positive(found)

    def _unloadable(self) -> int:
        """Tokens that vLLM does not look up: a load has whole chunks, and at least one."""
        end = self.prompt % self.tokens_per_chunk
        is_too_short = self.prompt - end - self.own < self.tokens_per_chunk
        return self.prompt if is_too_short else end

    def record(
        self, request_id: str, chunks: bytes = b"", parting: Parting | None = None
    ) -> MissRecord:
        """The account is closed; `chunks` and `parting` as in `MissRecord`."""
        missed = self.missed()
        is_loaded = self.stage is MissStage.SETTLED
        has_key = self.miss is not None and self.miss.reason in missed
        record = MissRecord(
            request_id=shown_id(request_id),
            prompt=self.prompt,
            own=self.own,
            loaded=self.loaded if is_loaded else 0,
            fetched=min(self.fetched, self.loaded) if is_loaded else 0,
            disk=max(0, min(self.disk, self.loaded - self.fetched)) if is_loaded else 0,
            missed={str(reason): count for reason, count in missed.items()},
            missing=self.miss.key if has_key and self.miss is not None else b"",
            places=[*self.miss.places] if has_key and self.miss is not None else [],
            chunks=chunks,
            chunk_tokens=self.tokens_per_chunk,
            parting=parting if is_loaded else None,
            tenant=self.tenant,
            ignored=self.ignored,
        )
        total = record.own + record.loaded + sum(record.missed.values())
        assert total == record.prompt, record
        return record


def _positive(counts: dict[MissReason, int]) -> dict[MissReason, int]:
    assert all(count >= 0 for count in counts.values()), counts
    return {reason: count for reason, count in counts.items() if count}


@dataclass(slots=True)
class Accounts:
    """The accounts of all requests of an engine.

    `tokens_per_chunk`: loads are multiples of it. `tenants_by_server`: the server
    says whose a request is.
    """

    tokens_per_chunk: int = 1
    tenants_by_server: bool = False
    counters: Counter[str] = field(
        default_factory=lambda: Counter(_tokens(MissRecord("", 0, 0, 0)))
    )
    _open: dict[str, TokenAccount] = field(default_factory=dict)
    _records: deque[MissRecord] = field(default_factory=lambda: deque(maxlen=MAX_WAITING))
    # Bytes of names since no record was waiting.
    _named: int = 0

    def open(self, request_id: str, num_prompt: int, tenant: str = "") -> None:
        """A request is new; a second call for the same id changes nothing."""
        account = TokenAccount(num_prompt, self.tokens_per_chunk, tenant=tenant)
        self._open.setdefault(request_id, account)

    def get(self, request_id: str) -> TokenAccount | None:
        """Return the account of a request that has not ended."""
        return self._open.get(request_id)

    def explain(self, why: Mapping[Key, MissReason]) -> None:
        """It has turned out why chunks were missing of which nothing was known."""
        for account in self._open.values() if why else ():
            miss = account.miss
            if miss is not None and miss.reason is MissReason.NEVER_STORED:
                account.miss = replace(miss, reason=why.get(miss.key, miss.reason))

    def close(
        self, request_id: str, keys: Sequence[bytes] = (), parting: Parting | None = None
    ) -> MissRecord | None:
        """The request has ended; None if it was never seen, or has ended before.

        Args:
            request_id: its id.
            keys: of its chunks, in order, of the group that decides what is loaded.
            parting: where it leaves the prompts before it.
        """
        account = self._open.pop(request_id, None)
        if account is None:
            return None
        record = account.record(request_id, self._names(keys), parting)
        self.counters.update(_tokens(record))
        self._records.append(record)
        return record

    def _names(self, keys: Sequence[bytes]) -> bytes:
        if not self._records:
            self._named = 0
        most = min(MAX_NAMED, (MAX_NAMES_BYTES - self._named) // CHUNK_NAME_BYTES)
        names = b"".join([key[:CHUNK_NAME_BYTES] for key in islice(keys, most)])
        self._named += len(names)
        return names

    def take_records(self) -> list[MissRecord]:
        """Take the records to send now."""
        return take(self._records, MAX_RECORDS)

    @property
    def has_records(self) -> bool:
        """Whether something waits for `take_records`."""
        return bool(self._records)

    def counter_values(self) -> dict[str, int]:
        """Tokens since the engine's start, by name; reasons that have occurred only."""
        flags = {"tenants_by_server": 1} if self.tenants_by_server else {}
        return {**self.counters, **flags}


def _tokens(record: MissRecord) -> dict[str, int]:
    """Count a record's tokens, by counter."""
    return {
        "prompt_tokens": record.prompt,
        "own_cache_tokens": record.own,
        "loaded_tokens": record.loaded,
        "fetched_tokens": record.fetched,
        "disk_tokens": record.disk,
        **{f"missed_tokens_{reason}": count for reason, count in record.missed.items()},
    }
