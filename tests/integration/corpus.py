"""Requests, good and bad, that vLLM's own OpenAI server and this app must answer alike.

Each is (name, path, body). Good ones are deterministic, so that the answers can be compared.
"""

from __future__ import annotations

from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

_HI = [{"role": "user", "content": "Say hello."}]
_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
_SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}


def _chat(name: str, **fields: Any) -> tuple[str, str, dict[str, Any]]:
    return name, CHAT, {"messages": _HI, "max_tokens": 8, "temperature": 0, **fields}


def _completion(name: str, **fields: Any) -> tuple[str, str, dict[str, Any]]:
    return name, COMPLETIONS, {"prompt": "One, two, three,", "max_tokens": 6, "temperature": 0, **fields}


GOOD = [
    _chat("plain"),
    _chat("max_completion_tokens", max_tokens=None, max_completion_tokens=5),
    _chat("stop", max_tokens=24, stop=["e"]),
    _chat("stop list", max_tokens=24, stop=["zzz", "l"]),
    _chat("stop kept", max_tokens=24, stop=["e"], include_stop_str_in_output=True),
    _chat("n=2", n=2, temperature=1.0, seed=5),
    _chat("logprobs", logprobs=True, top_logprobs=3),
    _chat("logprobs of none", logprobs=True, top_logprobs=0),
    _chat("prompt logprobs", prompt_logprobs=1),
    _chat("seed", temperature=1.0, seed=7),
    _chat("penalties", frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.1),
    _chat("sampling", temperature=0.8, top_p=0.5, top_k=5, min_p=0.1, seed=1),
    _chat("logit bias", logit_bias={"28": -100, "30": 5.0}),
    _chat("min tokens", min_tokens=6),
    _chat("ignore eos", ignore_eos=True),
    _chat("stop token ids", stop_token_ids=[2]),
    _chat("bad words", bad_words=["Hello"]),
    _chat("allowed tokens", allowed_token_ids=[10, 11, 12]),
    _chat("json object", response_format={"type": "json_object"}, max_tokens=40),
    _chat(
        "json schema",
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA, "strict": True}},
        max_tokens=60,
    ),
    _chat("choice", structured_outputs={"choice": ["yes", "no"]}),
    _chat("regex", structured_outputs={"regex": "[0-9]{3}"}),
    _chat("grammar", structured_outputs={"grammar": 'root ::= "a" | "b"'}),
    _chat("response format text", response_format={"type": "text"}),
    _chat("tools, none called", tools=[_WEATHER]),
    _chat("tools forbidden", tools=[_WEATHER], tool_choice="none"),
    _chat(
        "tool named", tools=[_WEATHER], tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=40,
    ),
    _chat("tool required", tools=[_WEATHER], tool_choice="required", max_tokens=60),
    _chat(
        "tool result",
        messages=[*_HI, {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                  {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}],
        tools=[_WEATHER],
    ),
    _chat("content parts", messages=[{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]),
    _chat("system", messages=[{"role": "system", "content": "Be brief."}, *_HI]),
    _chat("unicode", messages=[{"role": "user", "content": "\u00ab\u202f\u00e9t\u00e9 \U0001f31e \u4e2d\u6587"}]),
    _chat("continue", messages=[*_HI, {"role": "assistant", "content": "Hel"}], add_generation_prompt=False,
          continue_final_message=True),
    _chat("echo", messages=[*_HI, {"role": "assistant", "content": "Hel"}], add_generation_prompt=False,
          continue_final_message=True, echo=True),
    _chat("template kwargs", chat_template_kwargs={"unused": 1}),
    _chat("truncated", messages=[{"role": "user", "content": "word " * 50}], truncate_prompt_tokens=20),
    _chat("token ids returned", return_token_ids=True),
    _chat("unknown field", something_else=1),
    _chat("user", user="u1"),
    _chat("metadata", metadata={"a": "b"}, store=False),
    _chat("no model"),
    _chat("beam search", use_beam_search=True, n=2, max_tokens=4),
    _completion("plain"),
    _completion("default length", max_tokens=None),
    _completion("two prompts", prompt=["One, two,", "A, B,"]),
    _completion("token ids", prompt=[504, 3575, 282]),
    _completion("lists of token ids", prompt=[[504, 3575, 282], [1, 2, 3]]),
    _completion("two prompts, n=2", prompt=["One, two,", "A, B,"], n=2, temperature=1.0, seed=5),
    _completion("echo", echo=True),
    _completion("echo with logprobs", echo=True, logprobs=2),
    _completion("echo, nothing generated", echo=True, max_tokens=0),
    _completion("logprobs", logprobs=2),
    _completion("logprobs 0", logprobs=0),
    _completion("prompt logprobs", prompt_logprobs=0),
    _completion("stop", max_tokens=30, stop=["\n"]),
    _completion("seed", temperature=1.0, seed=3),
    _completion("choice", structured_outputs={"choice": ["yes", "no"]}),
    _completion("truncated", prompt="word " * 50, truncate_prompt_tokens=10),
    _completion("token ids returned", return_token_ids=True),
    _completion("no special tokens", add_special_tokens=False),
    _completion("beam search", use_beam_search=True, n=2, max_tokens=4),
]  # fmt: skip

# The status that a client's mistake deserves, whatever vLLM answers.
BAD = [
    (400, _chat("no messages", messages=[])),
    (400, _chat("messages missing", messages=None)),
    (400, _chat("messages a string", messages="hi")),
    (400, _chat("message without role", messages=[{"content": "x"}])),
    (400, _chat("message a string", messages=["x"])),
    (400, _chat("unknown role type", messages=[{"role": 7, "content": "x"}])),
    (400, _chat("content a number", messages=[{"role": "user", "content": 7}])),
    (400, _chat("unknown content part", messages=[{"role": "user", "content": [{"type": "smell", "smell": "x"}]}])),
    (400, _chat("image for a text model", messages=[
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}])),
    (400, _chat("temperature negative", temperature=-1)),
    (400, _chat("temperature a string", temperature="hot")),
    (400, _chat("top_p zero", top_p=0)),
    (400, _chat("top_p above one", top_p=1.5)),
    (400, _chat("top_k negative", top_k=-5)),
    (400, _chat("n zero", n=0)),
    (400, _chat("n negative", n=-1)),
    (400, _chat("n huge", n=10**9)),
    (400, _chat("n above one, greedy", n=2, temperature=0, best_of=1, logprobs="x")),
    (400, _chat("max_tokens zero", max_tokens=0)),
    (400, _chat("max_tokens negative", max_tokens=-1)),
    (400, _chat("max_tokens too large", max_tokens=10**6)),
    (400, _chat("max_tokens huge", max_tokens=10**30)),
    (400, _chat("max_tokens a float", max_tokens=1.5)),
    (400, _chat("min_tokens above max", min_tokens=9, max_tokens=8)),
    (400, _chat("prompt too long", messages=[{"role": "user", "content": "word " * 9000}])),
    (400, _chat("top_logprobs without logprobs", top_logprobs=2)),
    (400, _chat("top_logprobs too many", logprobs=True, top_logprobs=500)),
    (400, _chat("top_logprobs negative", logprobs=True, top_logprobs=-3)),
    (400, _chat("prompt_logprobs negative", prompt_logprobs=-7)),
    (400, _chat("stream options without stream", stream=False, stream_options={"include_usage": True})),
    (400, _chat("response format unknown", response_format={"type": "xml"})),
    (400, _chat("json schema missing", response_format={"type": "json_schema"})),
    (400, _chat("json schema not a schema", response_format={
        "type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "nonsense"}}})),
    (400, _chat("regex broken", structured_outputs={"regex": "("})),
    (400, _chat("grammar broken", structured_outputs={"grammar": "root ::= ("})),
    (400, _chat("choice empty", structured_outputs={"choice": []})),
    (400, _chat("json schema that refers to itself", structured_outputs={"json": {"$ref": "#"}})),
    (400, _chat("json schema with a broken pattern", response_format={
        "type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "string", "pattern": "("}}})),
    (400, _chat("regex with lookahead", structured_outputs={"regex": "(?=a)b"})),
    (400, _chat("stop token out of vocabulary", stop_token_ids=[10**12])),
    (400, _chat("template arguments that are a template", chat_template_kwargs={"chat_template": "x"})),
    (400, _chat("greedy with n", n=2, temperature=0)),
    (400, _chat("two constraints", structured_outputs={"regex": "a", "choice": ["a"]})),
    (400, _chat("logit bias out of vocabulary", logit_bias={"999999": 1})),
    (400, _chat("logit bias not a token", logit_bias={"a": 1})),
    (400, _chat("allowed tokens empty", allowed_token_ids=[])),
    (400, _chat("allowed tokens out of vocabulary", allowed_token_ids=[999999])),
    (400, _chat("bad words empty", bad_words=[""])),
    (400, _chat("stop empty string", stop=[""])),
    (400, _chat("stop a number", stop=3)),
    (400, _chat("seed out of range", seed=2**70)),
    (400, _chat("repetition penalty zero", repetition_penalty=0)),
    (400, _chat("presence penalty out of range", presence_penalty=9)),
    (400, _chat("tool choice without tools", tool_choice="auto")),
    (400, _chat("tool choice unknown function", tools=[_WEATHER], tool_choice={
        "type": "function", "function": {"name": "nope"}})),
    (400, _chat("tool choice nonsense", tools=[_WEATHER], tool_choice="sometimes")),
    (400, _chat("tools empty, required", tools=[], tool_choice="required")),
    (400, _chat("tools malformed", tools=[{"type": "function"}])),
    (400, _chat("template from the client", chat_template="{{ 1 }}")),
    (400, _chat("both generation flags", add_generation_prompt=True, continue_final_message=True)),
    (400, _chat("truncate below minus one", truncate_prompt_tokens=-2)),
    (400, _chat("cache salt empty", cache_salt="")),
    (404, _chat("model unknown", model="nope")),
    (400, _chat("model a number", model=3)),
    (400, _chat("surrogate", messages=[{"role": "user", "content": "\ud800"}])),
    (400, _completion("prompt missing", prompt=None)),
    (400, _completion("prompt empty list", prompt=[])),
    (400, _completion("prompt empty", prompt="")),
    (400, _completion("prompt a number", prompt=7)),
    (400, _completion("prompt mixed", prompt=["a", 1])),
    (400, _completion("token out of vocabulary", prompt=[999999])),
    (400, _completion("token negative", prompt=[-1])),
    (400, _completion("prompt embeds", prompt=None, prompt_embeds="AAAA")),
    (400, _completion("suffix", suffix="x")),
    (400, _completion("logprobs negative", logprobs=-1)),
    (400, _completion("logprobs too many", logprobs=1000)),
    (400, _completion("max_tokens negative", max_tokens=-4)),
    (400, _completion("prompt too long", prompt="word " * 9000)),
    (400, _completion("stream with beam search", stream=True, use_beam_search=True)),
    (404, _completion("model unknown", model="nope")),
]  # fmt: skip
