"""Small templates that write tool calls in the forms that published ones do; written for this."""

from __future__ import annotations

from typing import NamedTuple


class Form(NamedTuple):
    """template, the turn of `f(city="Paris", n=3)` less its end, and special tokens."""

    template: str
    turn: str
    specials: tuple[str, ...] = ()
    several: bool = True


_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% if m.tool_calls %}"
    "%s{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LOOP = "{% for c in m.tool_calls %}{% set f = c.function %}"
_ENDS = ("<|im_start|>", "<|im_end|>")


def _chatml(body: str) -> str:
    return _CHATML.replace("%s", body)


_XML = (
    "{{ '\n' if m.content }}<tool_call>\n<function={{ f.name }}>\n{% for k, v in"
    " f.arguments.items() %}<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>{{ '\n' if not loop.last }}{% endfor %}"
)
_GLM = (
    "<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
    "{{ '\n' if not loop.last }}{% endfor %}"
)
_TYPED = (
    '<｜DSML｜invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}'
    "<｜DSML｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
    "{{ v if v is string else v | tojson }}</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n"
    "{% endfor %}"
)

FORMS: dict[str, Form] = {
    "hermes": Form(
        _chatml(
            f"{_LOOP}{{{{ '\\n' if m.content or not loop.first }}}}<tool_call>\n"
            '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
            "{% endfor %}"
        ),
        '<tool_call>\n{"name": "f", "arguments": {"city": "Paris", "n": 3}}\n</tool_call>',
        _ENDS,
    ),
    "either": Form(
        _chatml(
            f"{_LOOP}{{{{ '\\n' if not loop.first }}}}<tool_call>\n"
            '{"name": "{{ f.name }}", "arguments": {% if f.arguments is string %}{{ f.arguments }}'
            "{% else %}{{ f.arguments | tojson }}{% endif %}}\n</tool_call>{% endfor %}"
        ),
        '<tool_call>\n{"name": "f", "arguments": {"city": "Paris", "n": 3}}\n</tool_call>',
        (*_ENDS, "<tool_call>", "</tool_call>"),
    ),
    "qwen coder": Form(
        _chatml(_LOOP + _XML),
        "<tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\n<parameter=n>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        _ENDS,
    ),
    "glm": Form(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content or '' }}{% if m.tool_calls %}"
        + _LOOP
        + _GLM
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        ("<|user|>", "<|assistant|>", "<|tool|>", "<tool_call>", "</tool_call>", "</arg_value>"),
    ),
    "typed": Form(
        "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% if m.tool_calls %}"
        f"\n\n<｜DSML｜function_calls>\n{_LOOP}{_TYPED}</｜DSML｜function_calls>{{% endif %}}<end>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="city"'
        ' string="true">Paris</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">3'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        ("｜DSML｜", "<end>"),
    ),
    "mistral": Form(
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif"
        " m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }} {{ m.content }}[/TOOL_RESULTS]"
        "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
        "{{ raise_exception('ids have nine characters') }}{% endif %}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id":'
        ' "{{ c.id }}"}{{ ", " if not loop.last }}{% endfor %}]</s>{% else %}{{ m.content }}</s>'
        "{% endif %}{% endfor %}",
        '[TOOL_CALLS][{"name": "f", "arguments": {"city": "Paris", "n": 3}, "id": "call00000"}]',
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
    ),
    "ministral": Form(
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif"
        " m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else %}{% if m.content"
        " is string %}{{ m.content }}{% else %}{% for p in m.content or [] %}{% if p.type =="
        " 'thinking' %}[THINK]{{ p.thinking }}[/THINK]{% else %}{{ p.text }}{% endif %}{% endfor %}"
        "{% endif %}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
        "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
        "{{ c.function.arguments | tojson }}{% endif %}{% endfor %}</s>{% endif %}{% endfor %}",
        '[TOOL_CALLS]f[ARGS]{"city": "Paris", "n": 3}',
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "</s>"),
    ),
    "command": Form(
        "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}<|START_ACTION|>[\n"
        '{% for c in m.tool_calls %}    {"tool_call_id": "{{ loop.index0 }}", "tool_name":'
        ' "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
        "{{ ',' if not loop.last }}\n{% endfor %}]<|END_ACTION|>{% elif m.role == 'assistant' %}"
        "<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% else %}{{ m.content }}{% endif %}"
        "<|END|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"city":'
        ' "Paris", "n": 3}}\n]<|END_ACTION|>',
        ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|END|>"),
    ),
    "deepseek": Form(
        "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role =="
        " 'tool' %}<｜tool▁output｜>{{ m.content }}{% elif m.content is none %}<｜Assistant｜>"
        "<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.type }}"
        "<｜tool▁sep｜>{{ c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}"
        "<｜tool▁call▁end｜>{{ '\n' if not loop.last }}{% endfor %}<｜tool▁calls▁end｜><｜end｜>"
        "{% else %}<｜Assistant｜>{{ m.content }}<｜end｜>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"city": "Paris", "n": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜end｜>"),
    ),
    "kimi": Form(
        "{% set past = [] %}{% for m in messages %}{% set _ = past.append(m) %}<|im_{{ m.role }}|>"
        "{{ m.content or '' }}{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in"
        " m.tool_calls %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
        "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
        "{{ c.function.arguments | tojson }}{% endif %}<|tool_call_end|>{% endfor %}"
        "<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_assistant|>{% endif %}",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"city": "Paris", "n": 3}<|tool_call_end|><|tool_calls_section_end|>',
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>", "<|im_end|>"),
    ),
    "harmony": Form(
        "{% for m in messages %}{% if m.tool_calls %}{% if m.thinking %}<|start|>assistant"
        "<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
        "{% set f = m.tool_calls[0].function %}"
        "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
        "{{ f.arguments | tojson }}<|call|>{% elif m.role == 'assistant' %}<|start|>assistant"
        "<|channel|>final<|message|>{{ m.content }}<|return|>{% else %}<|start|>{{ m.role }}"
        "<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        ' to=functions.f<|channel|>commentary json<|message|>{"city": "Paris", "n": 3}',
        ("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|end|>", "<|return|>"),
        several=False,
    ),
    "llama": Form(
        "{% for m in messages %}<|start|>{{ m.role }}<|head|>\n\n{% if m.tool_calls %}{% if"
        " m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
        '{"name": "{{ m.tool_calls[0].function.name }}", "parameters":'
        " {{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}"
        "<|eot|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|head|>\n\n"
        "{% endif %}",
        '{"name": "f", "parameters": {"city": "Paris", "n": 3}}',
        ("<|start|>", "<|head|>", "<|eot|>"),
        several=False,
    ),
    "python": Form(
        _chatml(
            "[{% for c in m.tool_calls %}{{ c.function.name }}({% for k, v in"
            " c.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}"
            "{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]"
        ),
        '[f(city="Paris", n=3)]',
        _ENDS,
    ),
    "quoted": Form(
        "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls"
        " or [] %}<call>call:{{ c.function.name }}{% raw %}{{% endraw %}{% if c.function.arguments"
        " is mapping %}{% for k, v in c.function.arguments.items() %}{{ k }}:{% if v is string %}"
        '<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}'
        "{{ ',' if not loop.last }}{% endfor %}{% else %}{{ c.function.arguments }}"
        "{% endif %}}</call>{% endfor %}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>assistant\n{% endif %}",
        '<call>call:f{city:<|"|>Paris<|"|>,n:3}</call>',
        ("<turn>", "<call>", "</call>", '<|"|>', "<end>"),
    ),
    "granite, listed": Form(
        "{% if tools %}<|role|>tools<|end_role|>{{ tools | tojson }} Answer with <|tool_call|>"
        " and a list.<|eot|>{% endif %}{% for m in messages %}<|role|>{{ m.role }}<|end_role|>"
        "{{ m.content }}<|eot|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|role|>assistant<|end_role|>{% endif %}",
        '<|tool_call|>[{"name": "f", "arguments": {"city": "Paris", "n": 3}}]',
        ("<|role|>", "<|end_role|>", "<|tool_call|>", "<|eot|>"),
    ),
    "phi, listed": Form(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'system' and"
        " m.tools %}<|tool|>{{ m.tools }}<|/tool|>{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        '<|tool_call|>[{"name": "f", "arguments": {"city": "Paris", "n": 3}}]<|/tool_call|>',
        ("<|tool_call|>", "<|/tool_call|>", "<|end|>"),
    ),
}
