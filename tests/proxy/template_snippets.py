"""Chat templates put together from pieces, for what a test wants one to do."""

TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content }}%s{{ '<|im_end|>\\n' }}"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


def chatml(before="", inside="", after="", ask=ASK, calls=CALLS):
    """A plain template with additions before, in and after each message `m`."""
    turn = TURN % (calls + inside)
    return f"{{% for m in messages %}}{before}{turn}{after}{{% endfor %}}{ask}"
