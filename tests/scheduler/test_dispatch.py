"""Names of executions."""

import pytest
from gyre_scheduler.dispatch import execution_names, group_of
from gyre_scheduler.errors import ProtocolError
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(0, 10**9), st.integers(1, 20))
def test_a_name_leads_back_to_its_group(group, size):
    assert {group_of(name) for name in execution_names(group, size)} == {group}


@pytest.mark.parametrize(
    "text", ["", "nonsense", "g00001", "g1-0", "h00001-0", "g00001-x", "g0000١-0", "g00001-0 "]
)
def test_another_text_is_no_execution(text):
    with pytest.raises(ProtocolError, match="does not name an execution"):
        group_of(text)
