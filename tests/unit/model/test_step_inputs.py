"""Tests which block tables are kept from one step to the next."""

import pytest

from baton.core.kv.block_hash import token_ids
from baton.engine.state.step import StepSequence
from baton.model.step.step_inputs import BlockTables


def sequence(seq_id: int, block_table: tuple[int, ...]) -> StepSequence:
    return StepSequence(seq_id=seq_id, token_ids=token_ids([1]), position_begin=0, kv_begin=0, block_table=block_table)


def test_table_is_converted_only_if_its_tuple_changed() -> None:
    tables, table = BlockTables(10), (3, 4)
    first = tables.of(sequence(1, table))
    tables.next_step()
    assert tables.of(sequence(1, table)) is first
    assert tables.of(sequence(2, table)) is not first, "by sequence"
    tables.next_step()
    longer = tables.of(sequence(1, (*table, 5)))
    assert longer.tolist() == [3, 4, 5]
    tables.next_step()
    assert tables.of(sequence(1, table)).tolist() == [3, 4], "it has lost a block"


def test_tables_unused_for_two_steps_are_dropped() -> None:
    tables, table = BlockTables(10), (3, 4)
    first = tables.of(sequence(1, table))
    for _ in range(2):
        tables.next_step()
    assert tables.of(sequence(1, table)) is not first


@pytest.mark.parametrize("table", [(3, 10), (-1,)])
def test_blocks_that_do_not_exist_are_refused_every_time(table: tuple[int, ...]) -> None:
    tables = BlockTables(10)
    for _ in range(2):
        with pytest.raises(ValueError, match="must be 0 to 9"):
            tables.of(sequence(1, table))
        tables.next_step()
