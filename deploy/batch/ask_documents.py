"""Batch inference with Ray Data: questions about documents, whose KV all workers share.

    pip install '.[gpu,llm]'                   # in a clone of RayKV
    python deploy/batch/ask_documents.py MODEL report.txt law.txt -q 'Who?' -q 'When?' --workers 4

Every prompt is a document, then a question. Ray Data gives rows to whichever worker is free. The
worker that is first at a document computes it; for the others, on all nodes, and for the next run,
its KV lies in the pools. So does that of chats which an application of Ray Serve has answered with
the same model and the same options of vLLM.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig

import raykv

ROWS_AT_ONCE = 8
"""What a worker is given at a time; less spreads few rows over more workers."""


def ask(
    model: str,
    documents: Mapping[str, str],
    questions: Sequence[str],
    **options: Any,
) -> list[dict[str, str]]:
    """The answers: rows of `document`, `question`, `answer`; `options`: see `engines`."""
    processor = build_processor(
        engines(model, **options),
        preprocess=partial(to_request, model),
        postprocess=lambda row: {
            name: row[name] for name in ("document", "question", "generated_text")
        },
    )
    rows = [
        {"document": name, "text": text, "question": question}
        for name, text in documents.items()
        for question in questions
    ]
    answers: list[dict[str, str]] = processor(ray.data.from_items(rows)).take_all()
    return answers


def engines(
    model: str,
    *,
    workers: int = 1,
    settings: Mapping[str, Any] | None = None,
    engine_kwargs: Mapping[str, Any] | None = None,
    resources: Mapping[str, float] | None = None,
) -> vLLMEngineProcessorConfig:
    """Workers that each run an engine of vLLM with RayKV.

    Args:
        model: a name or a folder, as for vLLM.
        workers: how many engines.
        settings: RayKV's.
        engine_kwargs: options of vLLM.
        resources: what Ray reserves for an engine; None: a GPU for each of its ranks.
    """
    transfer = {
        "kv_connector": "RayKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            # This cluster, whichever others run on the workers' hosts.
            "ray_address": ray.get_runtime_context().gcs_address,
            **(settings or {}),
        },
    }
    return vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs={**(engine_kwargs or {}), "kv_transfer_config": transfer},
        concurrency=(workers, workers),
        batch_size=ROWS_AT_ONCE,
        placement_group_config={"bundles": [dict(resources)]} if resources else None,
        # `to_request` makes the token ids, vLLM the text.
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
    )


def to_request(model: str, row: dict[str, str]) -> dict[str, Any]:
    """What a worker's engine is asked: the token ids that vLLM's server makes of the same chat."""
    chat = [
        {"role": "system", "content": row["text"]},
        {"role": "user", "content": row["question"]},
    ]
    ids = tokenizer(model).apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    return {
        "document": row["document"],
        "question": row["question"],
        "tokenized_prompt": ids,
        "sampling_params": {"max_tokens": 64, "temperature": 0.0},
    }


@cache
def tokenizer(model: str) -> Any:
    """The model's, loaded once per process."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def main() -> None:
    """Ask, print the answers, and where the prompts' tokens came from."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("documents", nargs="+", type=Path)
    parser.add_argument("-q", "--question", action="append", required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--pool-bytes", default="8GiB", help="RAM that each node lends")
    parser.add_argument("--engine", type=json.loads, default={}, help="options of vLLM, as JSON")
    parser.add_argument("--cpu", action="store_true", help="vLLM's CPU build: no GPUs are reserved")
    given = parser.parse_args()
    ray.init()
    answers = ask(
        given.model,
        {path.name: path.read_text() for path in given.documents},
        given.question,
        workers=given.workers,
        settings={"pool_bytes": given.pool_bytes},
        engine_kwargs=given.engine,
        resources={"CPU": 1.0} if given.cpu else None,
    )
    for row in answers:
        print(f"{row['document']}: {row['question']} {row['generated_text']}")
    with raykv.connect(ray.get_runtime_context().gcs_address) as cluster:
        records = [each.record for each in cluster.requests().found]
    print(
        f"{sum(each.prompt for each in records[-len(answers) :])} prompt tokens, of them "
        f"{sum(each.loaded for each in records[-len(answers) :])} loaded from the pools"
    )


if __name__ == "__main__":
    main()
