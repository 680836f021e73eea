"""Bodies made from an OpenAPI description: valid ones are served, invalid ones refused as the description says."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import schemathesis
from gyre_proxy.codec import Codec
from gyre_trajtree import read_run_log
from hypothesis import HealthCheck, given, settings
from openapi_document import DOCUMENT
from proxy_stage import DEADLINE_S, Stage
from schemathesis import GenerationMode
from schemathesis.checks import negative_data_rejection

SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = {operation.path: operation for operation in map(lambda r: r.ok(), SCHEMA.get_all_operations())}
LENIENT = negative_data_rejection
"""Null and empty values of fields that the description does not know are taken for absent ones."""
fuzzing = settings(
    max_examples=40,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def base(codec: Codec, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    stage = Stage()
    engine = stage.engine(codec, ["Fine."])
    record = tmp_path_factory.mktemp("schema") / "run.jsonl"
    proxy = stage.proxy(engines=(engine.url,), tokenizer=tokenizer_dir, record=record)
    yield f"{proxy.url}/x/e/v1"
    stage.clear()
    stage.close()
    assert list(read_run_log(record))


@pytest.mark.parametrize("path", OPERATIONS)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
def test_bodies_by_the_description_get_answers_by_the_description(base, path, mode):
    with requests.Session() as session:

        @fuzzing
        @given(OPERATIONS[path].as_strategy(generation_mode=mode))
        def attempt(case):
            answer = case.call(base_url=base, session=session, timeout=DEADLINE_S)
            case.validate_response(answer, excluded_checks=[LENIENT])
            if mode is GenerationMode.POSITIVE:
                assert answer.status_code == 200, answer.text

        attempt()
