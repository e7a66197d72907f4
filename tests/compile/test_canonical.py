import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxbucket.compile.canonical import canonical_json, digest_of

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=12,
)


@given(json_values)
def test_canonical_json_reads_back_as_it_was(value: Any) -> None:
    assert json.loads(canonical_json(value)) == value


@given(st.dictionaries(st.text(), json_values))
def test_key_order_does_not_matter(value: dict[str, Any]) -> None:
    backwards = dict(reversed(list(value.items())))
    assert digest_of(backwards) == digest_of(value)


@given(json_values, json_values)
def test_different_values_have_different_digests(a: Any, b: Any) -> None:
    # repr tells 1 from 1.0 from True, as JSON does.
    assert (digest_of(a) == digest_of(b)) == (
        repr(json.dumps(a, sort_keys=True)) == repr(json.dumps(b, sort_keys=True))
    )


def test_one_and_one_point_zero_and_true_differ() -> None:
    assert len({digest_of(1), digest_of(1.0), digest_of(True), digest_of("1")}) == 4


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_hold_is_refused(number: float) -> None:
    with pytest.raises(ValueError):
        canonical_json({"x": number})


def test_the_form_is_fixed() -> None:
    value = {"b": [1, 0.1, None, True], "a": "é"}
    assert canonical_json(value) == b'{"a":"\\u00e9","b":[1,0.1,null,true]}'
