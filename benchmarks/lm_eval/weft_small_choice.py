"""The small multiple-choice task: sixteen questions that the embedded model has a chance at."""

from __future__ import annotations

from typing import Any

# (question, its true continuation, others)
QUESTIONS = (
    ("Once upon a", " time", " table", " seven"),
    ("Tell me a story about a", " fox", " is", " the"),
    ("What is 2 + 3? 2 + 3 =", " 5", " 9", " 4"),
    ("What is 4 + 4? 4 + 4 =", " 8", " 2", " 7"),
    ("What is 10 - 7? 10 - 7 =", " 3", " 8", " 13"),
    ("The fox ran into the", " forest", " and", " quickly"),
    ("One morning she found a silver", " jar", " of", " ran"),
    ("The owl could not", " sleep", " the", " nine"),
    ("He said nothing for a", " while", " said", " under"),
    ('{"name":', ' "Lena"', " }", " ]"),
    ("Use 4 9 10 13 to make", " 24", " fox", " morning"),
    ("From that day on they were", " friends", " of", " 17"),
    ("She looked up at the", " sky", " walked", " slowly"),
    ("Two and two make", " four", " blue", " under"),
    ("The day after Monday is", " Tuesday", " fox", " seven"),
    ("They lived happily ever", " after", " before", " table"),
)


def load(**_: Any) -> dict[str, Any]:
    """Return the task's one split; the true choice is not always the first."""
    from datasets import Dataset

    rows = []
    for number, (question, *choices) in enumerate(QUESTIONS):
        turned = choices[-(number % 3) :] + choices[: -(number % 3)] if number % 3 else choices
        rows.append({"question": question, "choices": turned, "answer": turned.index(choices[0])})
    return {"test": Dataset.from_list(rows)}
