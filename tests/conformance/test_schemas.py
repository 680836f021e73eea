"""What an engine without a grammar backend does with a schema: it says so, and goes on serving."""


def test_a_schema_without_a_grammar_backend_is_refused(engine):
    answer = engine.generate(4, sampling={"json_schema": '{"type": "object"}'})
    assert answer.status_code == 400
    assert "json_schema" in answer.json()["error"]["message"]
    assert engine.answer(2)["meta_info"]["completion_tokens"] == 2
