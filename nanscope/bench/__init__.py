"""What nanscope costs, measured where it runs: `nanscope bench`.

measure   seconds by two clocks, quartiles, bits, waits, memory, a process of its own       alone     what such a process runs
tools     what watches: nobody, nanscope, the other ways to look for NaN                     steps     what is trained
turns     the tools by turns on one step, calls, sampling, asked, growth, others, ranks      subjects  their table, and what runs them
table     the result on the terminal, as JSON, and as a row of a history

Notable: nothing here is imported by a run that is watched, and nothing is asserted about time. What is asserted is that the weights are the
same to the last bit, watched and bare, and that nanscope saw every step.
"""

NAMES = (
    "call",
    "small",
    "24m",
    "150m",
    "generation",
    "sac",
    "ppo",
    "dqn",
    "trl",
    "ddp",
    "verdict",
    "tokens",
    "growth",
)  # what can be measured, known without torch
