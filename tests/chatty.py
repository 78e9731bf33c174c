"""A folder with the embedded model whose chat template reads tools and reasoning, as Qwen's do."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from shallow import TINY

_TEMPLATE = """{{ bos_token }}
{%- if tools %}<|system|>You may call:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write calls as <tool_call>{"name": "…", "arguments": {}}</tool_call>.<|end|>{% endif %}
{%- for m in messages %}
{{- '<|' + m.role + '|>' }}
{%- if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>
{% endif %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{%- if not loop.last or m.role != 'assistant' or add_generation_prompt %}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>
{% endif %}{% endif %}"""


@cache
def _binding() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="weft-chatty-")


@cache
def chatty() -> Path:
    """Write the folder, which goes when the tests end; return it."""
    folder = Path(_binding().name) / "chatty"
    shutil.copytree(TINY, folder)
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return folder
