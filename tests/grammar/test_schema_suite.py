"""The JSON Schema Test Suite: what a grammar lets pass fulfils the schema, by `jsonschema` and to the letter."""

import pytest
from grammar_walks import ByteGrammars
from schema_judge import Judge, pairs
from schema_suite import Group, groups


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> ByteGrammars:
    return ByteGrammars(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def suite() -> list[Group]:
    return list(groups())


def test_no_value_that_a_schema_forbids_is_accepted(suite: list[Group], grammars: ByteGrammars) -> None:
    judge = Judge(grammars, seed=0, num_walks=1)
    for group in suite:
        judge.try_group(group)
    assert judge.tally.wrong == []
    assert judge.tally.compiled > 0.5 * judge.tally.schemas  # those without a keyword that no grammar enforces
    assert judge.tally.valid_accepted > 0.5 * judge.tally.valid
    assert judge.tally.complete > 0.95 * judge.tally.walks


def test_schemas_that_are_put_together_of_two_are_enforced_both(
    suite: list[Group], grammars: ByteGrammars, thoroughness: float
) -> None:
    judge = Judge(grammars, seed=1, num_walks=1)
    for name, schema in pairs(suite, round(600 * thoroughness), seed=1):
        judge.try_schema(name, schema)
    assert judge.tally.wrong == []
    assert judge.tally.complete > 0.2 * judge.tally.schemas
