"""What a simulated world is like: its parts, how fast each is, and what befalls them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.simulation.wire import Manners


@dataclass(frozen=True)
class WorldNature:
    """What a world is like: how many parts it has, how fast each is, and what befalls them.

    `pieces`: how many blocks are copied in one step.
    """

    is_calm: bool
    num_nodes: int
    num_engines: int
    num_documents: int
    num_slabs: int
    kv_blocks: int
    results_share: float
    most_events: int
    pieces: tuple[int, ...]
    manners: Manners
    routine: dict[str, float]
    faults: dict[str, float]


def nature(rng: random.Random) -> WorldNature:
    """A nature of its own for each seed: some faults never happen, others often."""
    is_calm = rng.random() < 0.1
    storm = 0.0 if is_calm else rng.choice([0.3, 0.3, 1.0, 1.0, 3.0])
    faults = {
        name: 0.0 if rng.random() < 0.3 else weight * storm for name, weight in FAULTS.items()
    }
    loss, repeat, disorder = (
        rng.choice(chances) for chances in ([0.0, 0.02, 0.1], [0.0, 0.05, 0.15], [0.0, 0.1, 0.5])
    )
    return WorldNature(
        is_calm=is_calm,
        num_nodes=rng.choice([2, 2, 3, 4]),
        num_engines=rng.choice([2, 3, 3, 4]),
        num_documents=rng.choice([2, 4, 6, 12]),
        num_slabs=160 if is_calm else rng.choice([4, 4, 6, 12]),
        kv_blocks=rng.choice([64, 128]),
        results_share=rng.choice([0.2, 0.7]),
        most_events=rng.choice([30, 100, 100_000]),
        pieces=rng.choice([(1, 4), (1, 8, 24), (8, 24)]),
        manners=Manners() if is_calm else Manners(loss, repeat, disorder),
        routine=ROUTINE | {name: ROUTINE[name] * rng.choice([0.3, 1, 3]) for name in WORK},
        faults=faults,
    )


# How often each thing happens, beside the others.
ROUTINE = {
    "wire": 90.0,
    "sockets": 50.0,
    "engine_steps": 25.0,
    "request_comes": 10.0,
    "engine_talks": 10.0,
    "node_copies": 50.0,
    "node_fetches": 20.0,
    "node_answers": 25.0,
    "node_reports": 14.0,
    "node_looks_at_its_clock": 1.0,
    "node_looks_for_pins": 1.0,
    "head_works": 5.0,
    "head_looks_at_its_clock": 2.0,
    "time_passes": 6.0,
    "somebody_loses_patience": 5.0,
    "worker_looks_for_its_node": 5.0,
    "node_notices_a_closed_line": 3.0,
    "rank_notices_a_broken_line": 3.0,
    "reader_polls": 2.0,
    "cut_heals": 0.6,
    "node_thaws": 2.0,
    "copy_goes_on": 1.0,
    "late_copy_meets_a_new_one": 10.0,
    "ghost_thaws": 0.5,
    "head_comes_back": 2.0,
    "operator_repeats": 1.0,
    "operator_resumes": 1.0,
    "weights_come": 1.0,
}

# What is slow in some worlds, and fast in others.
WORK = ["engine_talks", "node_copies", "node_fetches", "node_answers", "node_reports"]

FAULTS = {
    "copy_fails": 1.5,
    "copy_hangs": 1.0,
    "rank_fails_while_another_hangs": 3.0,
    "bits_rot": 0.4,
    "engine_gives_a_job_up": 0.4,
    "fetch_is_late": 0.3,
    "line_breaks": 0.3,
    "node_restarts": 0.1,
    "node_is_cut": 0.1,
    "node_is_cut_from_the_head": 0.1,
    "node_freezes": 0.1,
    "node_leaves": 0.05,
    "engine_is_cut": 0.1,
    "feed_is_cut": 0.1,
    "engine_dies": 0.1,
    "engine_dies_while_it_stores": 0.5,
    "engine_resets": 0.1,
    "weights_change": 0.05,
    "head_dies": 0.1,
    "head_dies_while_it_orders": 0.05,
    "store_loses_what_it_kept": 0.05,
    "operator_clears": 0.1,
    "node_misses_a_clear": 0.15,
    "operator_pauses": 0.05,
    "operator_pins": 0.1,
    "operator_shares": 0.05,
    "time_jumps": 0.1,
    "node_clock_jumps": 0.1,
    "engine_clock_jumps": 0.1,
    "head_clock_jumps": 0.05,
}
