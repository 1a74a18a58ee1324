"""Ten chat formats as their makers publish them: a template in Jinja, and the same by a function in Python.

The function gives the texts of a conversation, each with whether the loss counts it: what the model itself would have
to say after the request for an answer, with the token that ends a turn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Messages: TypeAlias = Sequence[tuple[str, str]]  # role, text
Parts: TypeAlias = list[tuple[str, bool]]  # text, whether it is counted


@dataclass(frozen=True)
class ChatFormat:
    template: str
    parts: Callable[[Messages], Parts]
    special: tuple[str, ...]
    begin: str | None
    end: str
    turn_end: str  # the token that ends an answer
    alternates: bool = False  # user and assistant in turns alone
    system: bool = True  # whether it takes a message of the system


def simple(header: Callable[[str], str], end: str, opening: str = "", after: str = "\n", strip: bool = False):
    """Formats with a header and an end for each message."""

    def parts(messages: Messages) -> Parts:
        texts: Parts = [(opening, False)]
        for role, said in messages:
            text = said.strip() if strip else said
            is_answer = role == "assistant" and bool(said.strip())
            texts += [(header(role), False), (text + end, is_answer), (after, False)]
        return texts

    return parts


def chatml(messages: Messages) -> Parts:
    return simple(lambda role: f"<|im_start|>{role}\n", "<|im_end|>")(messages)


def llama3(messages: Messages) -> Parts:
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    return simple(header.format, "<|eot_id|>", "<|begin_of_text|>", "", strip=True)(messages)


def gemma(messages: Messages) -> Parts:
    def header(role: str) -> str:
        return f"<start_of_turn>{'model' if role == 'assistant' else role}\n"

    return simple(header, "<end_of_turn>", "<bos>", strip=True)(messages)


def phi3(messages: Messages) -> Parts:
    """The end of text is behind the last turn, which is an answer."""
    *parts, (last, counted), (line_end, _) = simple(lambda role: f"<|{role}|>\n", "<|end|>")(messages)
    return [*parts, (f"{last}{line_end}<|endoftext|>", counted)]


def zephyr(messages: Messages) -> Parts:
    return simple(lambda role: f"<|{role}|>\n", "</s>")(messages)


def instructed(opening: str, request: str, space: str, end: str) -> Callable[[Messages], Parts]:
    """Formats that put a question between marks: Llama 2, Mistral."""

    def parts(messages: Messages) -> Parts:
        texts: Parts = [] if opening else [("<s>", False)]
        for role, said in messages:
            if role == "user":
                texts.append((opening + request.format(said.strip() if opening else said), False))
            else:
                text = said.strip() if opening else said
                texts.append((f"{space}{text}{end}", bool(said.strip())))
        return texts

    return parts


def qwen3(messages: Messages) -> Parts:
    """An empty thought is before the last answer alone."""
    texts: Parts = []
    last = max((k for k, (role, _) in enumerate(messages) if role == "user"), default=-1)
    for k, (role, said) in enumerate(messages):
        if role == "assistant":
            thought = "<think>\n\n</think>\n\n" if k > last else ""
            answer = said.lstrip("\n") if thought else said
            texts += [("<|im_start|>assistant\n", False), (thought + answer + "<|im_end|>", bool(said.strip()))]
        else:
            texts.append((f"<|im_start|>{role}\n{said}<|im_end|>", False))
        texts.append(("\n", False))
    return texts


def deepseek(messages: Messages) -> Parts:
    texts: Parts = [("<bos>" + "\n\n".join(said for role, said in messages if role == "system"), False)]
    for role, said in messages:
        if role == "user":
            texts.append((f"<|User|>{said}<|Assistant|>", False))
        elif role == "assistant":
            texts.append((f"{said}<eos>", bool(said.strip())))
    return texts


def alpaca(messages: Messages) -> Parts:
    texts: Parts = []
    for role, said in messages:
        if role == "user":
            texts.append((f"### Instruction:\n{said.strip()}\n\n### Response:\n", False))
        elif role == "assistant":
            texts += [(f"{said}</s>", bool(said.strip())), ("\n\n", False)]
        else:
            texts.append((f"{said}\n\n", False))
    return texts


# Each line is a step; none of the line breaks between steps shows.
TURNS = r"""
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
"""
CHATML = r"""
{% for m in messages %}
{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
LLAMA_2 = rf"""
{{% for m in messages %}}
{TURNS}
{{% if m['role'] == 'user' %}}{{{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}}}
{{% else %}}{{{{ ' ' + m['content'].strip() + ' ' + eos_token }}}}{{% endif %}}
{{% endfor %}}
"""
LLAMA_3 = r"""
{% for m in messages %}
{% set text = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' %}
{% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}
{{ text }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""
MISTRAL = rf"""
{{{{ bos_token }}}}
{{% for m in messages %}}
{TURNS}
{{% if m['role'] == 'user' %}}{{{{ '[INST] ' + m['content'] + '[/INST]' }}}}
{{% else %}}{{{{ ' ' + m['content'] + eos_token }}}}{{% endif %}}
{{% endfor %}}
"""
GEMMA = rf"""
{{{{ bos_token }}}}
{{% for m in messages %}}
{TURNS}
{{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}}
{{{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}}}
{{% endfor %}}
{{% if add_generation_prompt %}}{{{{ '<start_of_turn>model\n' }}}}{{% endif %}}
"""
PHI_3 = r"""
{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}
"""
QWEN_3 = r"""
{% set ns = namespace(last=-1) %}
{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{% for m in messages %}
{% if m['role'] == 'assistant' %}
{% set text = m['content'].split('</think>')[-1] %}
{{ '<|im_start|>assistant\n' }}
{% if loop.index0 > ns.last %}{{ '<think>\n\n</think>\n\n' + text.lstrip('\n') }}{% else %}{{ text }}{% endif %}
{{ '<|im_end|>\n' }}
{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
DEEPSEEK = r"""
{% set ns = namespace(system=[]) %}
{% for m in messages %}
{% if m['role'] == 'system' %}{% set ns.system = ns.system + [m['content']] %}{% endif %}
{% endfor %}
{{ bos_token + ns.system | join('\n\n') }}
{% for m in messages %}
{% if m['role'] == 'user' %}{{ '<|User|>' + m['content'] + '<|Assistant|>' }}
{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}{% endif %}
{% endfor %}
"""
ZEPHYR = r"""
{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}
"""
ALPACA = r"""
{% for m in messages %}
{% if m['role'] == 'user' %}{{ '### Instruction:\n' + m['content'].strip() + '\n\n### Response:\n' }}
{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token + '\n\n' }}
{% else %}{{ m['content'] + '\n\n' }}{% endif %}
{% endfor %}
"""


def steps(template: str) -> str:
    return template.replace("\n", "")


FORMATS = {
    "chatml": ChatFormat(steps(CHATML), chatml, ("<|im_start|>", "<|im_end|>"), None, "<|im_end|>", "<|im_end|>"),
    "llama 2": ChatFormat(
        steps(LLAMA_2), instructed("<s>", "[INST] {} [/INST]", " ", " </s>"), (), "<s>", "</s>", "</s>", True, False
    ),
    "llama 3": ChatFormat(
        steps(LLAMA_3),
        llama3,
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|eot_id|>",
    ),
    "mistral": ChatFormat(
        steps(MISTRAL),
        instructed("", "[INST] {}[/INST]", " ", "</s>"),
        ("[INST]", "[/INST]"),
        "<s>",
        "</s>",
        "</s>",
        alternates=True,
        system=False,
    ),
    "gemma": ChatFormat(
        steps(GEMMA),
        gemma,
        ("<start_of_turn>", "<end_of_turn>"),
        "<bos>",
        "<eos>",
        "<end_of_turn>",
        alternates=True,
        system=False,
    ),
    "phi 3": ChatFormat(
        steps(PHI_3),
        phi3,
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        None,
        "<|endoftext|>",
        "<|end|>",
    ),
    "qwen 3": ChatFormat(
        steps(QWEN_3),
        qwen3,
        ("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
        None,
        "<|im_end|>",
        "<|im_end|>",
    ),
    "deepseek": ChatFormat(steps(DEEPSEEK), deepseek, ("<|User|>", "<|Assistant|>"), "<bos>", "<eos>", "<eos>"),
    "zephyr": ChatFormat(steps(ZEPHYR), zephyr, (), "<s>", "</s>", "</s>"),
    "alpaca": ChatFormat(steps(ALPACA), alpaca, (), "<s>", "</s>", "</s>"),
}
