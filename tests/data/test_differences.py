from outrider.data.differences import differences


def test_each_value_that_differs_is_named_with_both_values() -> None:
    before = {"same": 1, "kind": "a", "train": {"steps": 10, "seed": 0}, "parts": [1, 2], "gone": {"x": 1}}
    after = {"train": {"steps": 20, "seed": 0}, "kind": "b", "same": 1, "parts": [2, 1], "new": 3}
    assert differences(before, after) == {
        "kind": "kind (was 'a', is 'b')",
        "train.steps": "train.steps (was 10, is 20)",
        "parts": "parts (was [1, 2], is [2, 1])",
        "gone": "gone (was {'x': 1}, is None)",
        "new": "new (was None, is 3)",
    }


def test_an_option_that_is_missing_equals_one_that_is_off() -> None:
    assert differences({"train": {}}, {"train": {"patience": None}, "sharding": None}) == {}
