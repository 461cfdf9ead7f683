"""Chat templates of our own with the habits of the public ones, and what a model writes under each.

`written(reasoning, answer)` is the text that the target writes behind its prompt, up to and with the
token that ends it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

TAKE_APART = (  # of reasoning in a field or in the text
    "{% set c = m.content or '' %}{% set r = m.reasoning_content or '' %}"
    "{% if '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
)
LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
TOOLS = "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"


@dataclass(frozen=True, kw_only=True)
class Habit:
    """A chat template, and what the target writes under it."""

    template: str
    ends: tuple[str, ...]
    """The target's stop tokens."""
    written: Callable[[str | None, str], str]
    rewrites: bool = False
    """Whether earlier turns are written in another way than the last one."""
    opens: str = ""
    """What the prompt ends with, and only answers with reasoning go on."""
    strips: bool = False
    has_system: bool = True
    call: Callable[[str | None, str, str], str] | None = None
    """What the target writes for reasoning, a text, and the JSON of a call; None if the template has no calls."""
    calls_stand_alone: bool = False
    """Whether the template rejects a text beside a call."""


def inline(reasoning: str | None, answer: str) -> str:
    return answer if reasoning is None else f"<think>\n{reasoning}\n</think>\n\n{answer}"


def analysis(reasoning: str | None) -> str:
    return "" if reasoning is None else f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant"


HABITS = {
    # Appends turns, and knows nothing of reasoning: it stays in the text.
    "appends": Habit(
        template=(
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
        ends=("<|im_end|>",),
        written=lambda reasoning, answer: f"{inline(reasoning, answer)}<|im_end|>",
    ),
    # Reasoning behind the last question only, and a block in any case; calls as JSON.
    "forgets reasoning": Habit(
        template=(
            LAST_QUESTION + TOOLS + "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
            "{% if m.role == 'assistant' %}"
            + TAKE_APART
            + "{% if loop.index0 > ns.last %}<think>\n{{ r }}\n</think>\n\n{% endif %}"
            "{{ c }}{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
            "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n"
            "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
        ),
        ends=("<|im_end|>",),
        written=lambda reasoning, answer: f"{inline(reasoning or '', answer)}<|im_end|>",
        rewrites=True,
        call=lambda reasoning, text, call: f"{inline(reasoning or '', text)}<call>{call}</call><|im_end|>",
    ),
    # The prompt opens the reasoning, and every finished turn lacks it. Calls begin with a mark, too, before any text.
    "opens reasoning": Habit(
        template=(
            "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
            "{% elif m.role == 'assistant' %}<|Assistant|>"
            "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
            "{{ m.content.split('</think>')[-1] }}{{ eos_token }}"
            "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n"
            "{{ '\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking }}{% endif %}"
        ),
        ends=("</s>",),
        written=lambda reasoning, answer: f"{inline(reasoning, answer).removeprefix('<think>' + chr(10))}</s>",
        opens="<think>\n",
        rewrites=True,
        call=lambda reasoning, text, call: (
            f"{inline(reasoning, '').removeprefix('<think>' + chr(10))}<call>{call}</call>{text}</s>"
        ),
    ),
    # No token ends an answer: the next turn does. The prompt has words that the text lacks.
    "next turn ends": Habit(
        template=(
            LAST_QUESTION + "[gMASK]{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n"
            "{% if m.role == 'assistant' %}"
            + TAKE_APART
            + "{% if loop.index0 > ns.last and r %}<think>{{ r }}</think>{% else %}<think></think>{% endif %}{{ '\\n' + c }}"
            "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
            "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\nSteps:\n{% endif %}"
        ),
        ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
        written=lambda reasoning, answer: f"<think>{reasoning or ''}</think>\n{answer}<|user|>",
        opens="Steps:\n",
        rewrites=True,
        call=lambda reasoning, text, call: f"<think>{reasoning or ''}</think>\n{text}<call>{call}</call><|observation|>",
    ),
    # A short conversation ends with a further token.
    "ends twice": Habit(
        template=(
            "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>\n{% elif messages | length < 4 %}{{ eos_token }}{% endif %}"
        ),
        ends=("</s>", "<|end|>"),
        written=lambda reasoning, answer: f"{inline(reasoning, answer)}<|end|>",
    ),
    # Channels, and another end for earlier answers. Calls keep their reasoning until there is an answer.
    "channels": Habit(
        template=(
            "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
            "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
            "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant"
            "{% if loop.index0 >= ns.last and m.thinking and (loop.last or m.tool_calls) %}"
            "<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
            "{% if m.tool_calls %}{% if m.content %}<|channel|>commentary<|message|>{{ m.content }}<|end|><|start|>assistant"
            "{% endif %} to=function<|message|>{{ m.tool_calls[0].function | tojson }}<|call|>"
            "{% else %}<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}"
            "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
        ),
        ends=("<|return|>", "<|call|>"),
        written=lambda reasoning, answer: f"{analysis(reasoning)}<|channel|>final<|message|>{answer}<|return|>",
        rewrites=True,
        call=lambda reasoning, text, call: (
            analysis(reasoning)
            + (f"<|channel|>commentary<|message|>{text}<|end|><|start|>assistant" if text else "")
            + f" to=function<|message|>{call}<|call|>"
        ),
    ),
    # Other names of roles, no system prompt, and texts without white space around them.
    "strips": Habit(
        template=(
            "{{ bos_token }}{% for m in messages %}"
            "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
            "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
            "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
            "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
        ),
        ends=("<end_of_turn>",),
        written=lambda reasoning, answer: f"{inline(reasoning, answer).strip()}<end_of_turn>",
        strips=True,
        has_system=False,
    ),
    # A date, and a header before each turn. Calls stand in place of any text.
    "dates": Habit(
        template=(
            "<|start_header|>system<|end_header|>\n\nToday: {{ strftime_now('%d %b %Y') }}\n" + TOOLS + "<|eot|>"
            "{% for m in messages %}<|start_header|>{{ m.role }}<|end_header|>\n\n"
            "{% if m.tool_calls %}{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}"
            "{% else %}{{ m.content | trim }}{% endif %}<|eot|>{% endfor %}"
            "{% if add_generation_prompt %}<|start_header|>assistant<|end_header|>\n\n{% endif %}"
        ),
        ends=("<|eot|>",),
        written=lambda reasoning, answer: f"{inline(reasoning, answer).strip()}<|eot|>",
        rewrites=True,
        strips=True,
        call=lambda reasoning, text, call: f"{inline(reasoning, text)}{call}<|eot|>",
    ),
    # A space before each answer, no start of the next one, and calls in place of a missing content. The system
    # prompt stands in the last question only.
    "spaces": Habit(
        template=(
            "{% set has_system = messages[0].role == 'system' %}{{ bos_token }}"
            "{% for m in messages if m.role != 'system' %}{% if m.role == 'assistant' %}"
            "{% if m.content is none %}{% for call in m.tool_calls %} [CALL] "
            '{{ \'{"name": "\' + call.function.name }}'
            "{{ '\", \"arguments\": ' + call.function.arguments + '}' }}{% endfor %}"
            "{% else %} {{ m.content }}{% endif %}{{ eos_token }}"
            "{% else %}[INST] {{ messages[0].content + ' ' if has_system and loop.last }}"
            "{{ m.content }} [/INST]{% endif %}{% endfor %}"
        ),
        ends=("</s>",),
        written=lambda reasoning, answer: f" {inline(reasoning, answer)}</s>",
        rewrites=True,
        call=lambda reasoning, text, call: f" [CALL] {call}</s>",
        calls_stand_alone=True,
    ),
    # Marks the answers by itself.
    "marks": Habit(
        template=(
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
            "{% endgeneration %}<|im_end|>\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
        ends=("<|im_end|>",),
        written=lambda reasoning, answer: f"{inline(reasoning, answer)}<|im_end|>",
    ),
}
MARKED = HABITS["marks"]
HABITS["marks the line"] = replace(
    MARKED, template=MARKED.template.replace("{% endgeneration %}<|im_end|>\n", "<|im_end|>\n{% endgeneration %}")
)
