"""Hugging Face models by their config.json: what is told when they cannot be built."""

import pytest

from shardledger.errors import ConfigError
from shardledger.workload.hugging_face import hugging_face_factory, is_hugging_face


@pytest.mark.parametrize(
    ("text", "lesson"),
    [("{", "is not JSON"), ("{}", "no model_type"), ("[]", "no model_type"), (None, "cannot be read")],
)
def test_a_file_that_is_no_hugging_face_config_is_a_lesson(tmp_path, text, lesson):
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    assert is_hugging_face(str(file))
    with pytest.raises(ConfigError, match=lesson):
        hugging_face_factory(str(file))


def test_without_transformers_the_way_out_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert is_hugging_face(str(tmp_path))
    with pytest.raises(ConfigError, match="pip install 'shardledger\\[hf\\]', or count states alone with --params"):
        hugging_face_factory(str(tmp_path))


def test_other_names_are_not_taken_for_files():
    assert not is_hugging_face("gpt:1m")
    assert not is_hugging_face("package.module:function")
