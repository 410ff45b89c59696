"""Easy text: facts, arithmetic, counting and lists.

Nearly every word of an answer follows from the prompt or from the words just before it, so a draft
of one layer predicts it almost as well as the target. Answers are long, to leave room for many
rounds.
"""

import random
from collections.abc import Callable

from tools.train_embedded.knowledge import (
    ANIMALS,
    COLOURS,
    COUNTRIES,
    LISTS,
    MIXTURES,
    SHOPPING,
)
from tools.train_embedded.tasks import Task, Values


def _numbers(first: int, last: int) -> tuple[str, ...]:
    return tuple(str(n) for n in range(first, last + 1))


def _capital(values: Values, _: random.Random) -> str:
    country = values["country"]
    city, region, river, language, sight, dish = COUNTRIES[country]
    return (
        f"The capital of {country} is {city}. {city} is a large city in {region}, and it lies on "
        f"the river {river}. Most people in {city} speak {language}. Visitors to {city} like to "
        f"see {sight}. A typical dish in {country} is {dish}. So the capital of {country} is "
        f"{city}, on the river {river}."
    )


def _capital_only(values: Values, _: random.Random) -> str:
    return f"The capital of {values['country']} is {COUNTRIES[values['country']][0]}."


def _animal(values: Values, rng: random.Random) -> str:
    animal = values["animal"]
    kind, home, food, cover, young = ANIMALS[animal]
    opening = rng.choice((f"The {animal} is a {kind}.", f"A {animal} is a {kind}."))
    return (
        f"{opening} It lives {home}. A {animal} mostly eats {food}. Its body is covered with "
        f"{cover}. "
        f"A young {animal} is called a {young}. The {young} stays with its mother until it can "
        f"find {food} for itself. In short, the {animal} is a {kind} that lives {home} and eats "
        f"{food}."
    )


def _things(values: Values, rng: random.Random) -> str:
    colour = values["colour"]
    one, two, three, four = COLOURS[colour]
    opening = rng.choice((f"Here are some things that are {colour}", f"Many things are {colour}"))
    return (
        f"{opening}: {one}, {two}, {three} and {four}. The first is {one}, the second is {two}, "
        f"the third is {three}, and the fourth is {four}. All of these things are {colour}."
    )


def _mixture(values: Values, _: random.Random) -> str:
    result = MIXTURES[values["pair"]]
    things = COLOURS.get(result)
    first = f"When you mix {values['pair']}, you get {result}."
    if things is None:
        return first
    return f"{first} Some things that are {result} are {', '.join(things[:3])} and {things[3]}."


def _count(first: int, last: int, step: int = 1) -> str:
    return ", ".join(str(n) for n in range(first, last + (1 if step > 0 else -1), step))


def _count_up(values: Values, rng: random.Random) -> str:
    first, last = int(values["first"]), int(values["last"])
    opening = rng.choice(("Here are the numbers", "Counting"))
    return f"{opening} from {first} to {last}: {_count(first, last)}."


def _count_down(values: Values, _: random.Random) -> str:
    first, last = int(values["first"]), int(values["last"])
    return f"Counting down from {last} to {first}: {_count(last, first, -1)}."


def _count_in_steps(step: int) -> Callable[[Values, random.Random], str]:
    def answer(values: Values, _: random.Random) -> str:
        first = int(values["first"])
        last = first + step * 20
        return f"Starting from {first}: {_count(first, last, step)}."

    return answer


def _times_table(values: Values, _: random.Random) -> str:
    a = int(values["a"])
    rows = ", ".join(f"{a} times {b} is {a * b}" for b in range(1, 11))
    return f"The multiplication table of {a}: {rows}."


def _product(values: Values, _: random.Random) -> str:
    a, b = int(values["a"]), int(values["b"])
    rows = ", ".join(f"{a} times {n} is {a * n}" for n in range(1, b + 1))
    return f"Let us go step by step: {rows}. So {a} times {b} is {a * b}."


def _sum_by_counting(values: Values, _: random.Random) -> str:
    a, b = int(values["a"]), int(values["b"])
    return (
        f"Start at {a} and count up {b} more: {_count(a + 1, a + b)}. So {a} plus {b} is {a + b}. "
        f"We can also start at {a + b} and count down {b}: {_count(a + b - 1, a, -1)}. "
        f"So {a + b} minus {b} is {a}."
    )


def _sum_only(values: Values, _: random.Random) -> str:
    a, b = int(values["a"]), int(values["b"])
    return f"{a} plus {b} is {a + b}."


def _list(values: Values, rng: random.Random) -> str:
    what = values["list"]
    members = LISTS[what]
    first, last = members.split(", ")[0], members.split(", ")[-1]
    opening = rng.choice(("Here are", "These are"))
    return (
        f"{opening} {what}, in order: {members}. The first is {first}, and the last is {last}. "
        f"Once more, {what} are: {members}."
    )


def _shopping(values: Values, rng: random.Random) -> str:
    dish = values["dish"]
    one, two, three, four, five = SHOPPING[dish]
    opening = rng.choice(("Here is a shopping list", "This is what you need"))
    return (
        f"{opening} for {dish}: {one}, {two}, {three}, {four} and {five}. First put {one} and "
        f"{two} "
        f"into the basket. Then add {three} and {four}. Last, take {five}. Now you have everything "
        f"for {dish}."
    )


EASY_TASKS = (
    Task(
        "facts",
        (
            (
                "What is the capital of {country}? Answer in full sentences and tell me about the "
                "city."
            ),
            "Which city is the capital of {country}? Describe the city, its river and its food.",
        ),
        {"country": tuple(COUNTRIES)},
        _capital,
        3,
    ),
    Task(
        "facts",
        ("What is the capital of {country}? Answer in one sentence.",),
        {"country": tuple(COUNTRIES)},
        _capital_only,
        0.5,
    ),
    Task(
        "facts",
        (
            "Tell me about the {animal}. Where does it live, and what does it eat?",
            "What kind of animal is the {animal}? Describe its home, its food and its young.",
        ),
        {"animal": tuple(ANIMALS)},
        _animal,
        3,
    ),
    Task("facts", ("Name four things that are {colour}.",), {"colour": tuple(COLOURS)}, _things, 1),
    Task(
        "facts",
        ("Which colour do you get when you mix {pair}? Give some examples.",),
        {"pair": tuple(MIXTURES)},
        _mixture,
        0.7,
    ),
    Task(
        "arithmetic",
        ("Write the multiplication table of {a} from 1 to 10.",),
        {"a": _numbers(2, 9)},
        _times_table,
        1.5,
    ),
    Task(
        "arithmetic",
        ("What is {a} times {b}? Show the steps.",),
        {"a": _numbers(2, 9), "b": _numbers(3, 9)},
        _product,
        2,
    ),
    Task(
        "arithmetic",
        ("What is {a} plus {b}? Count up to find the answer, then check it.",),
        {"a": _numbers(10, 80), "b": _numbers(4, 9)},
        _sum_by_counting,
        2,
    ),
    Task(
        "arithmetic",
        ("What is {a} plus {b}? Answer with one short sentence.",),
        {"a": _numbers(1, 9), "b": _numbers(1, 9)},
        _sum_only,
        0.5,
    ),
    Task(
        "counting",
        (
            "Count from {first} to {last}.",
            "Please count from {first} up to {last}, one number at a time.",
        ),
        {"first": _numbers(1, 30), "last": _numbers(50, 70)},
        _count_up,
        2,
    ),
    Task(
        "counting",
        ("Count down from {last} to {first}.",),
        {"first": _numbers(1, 20), "last": _numbers(40, 60)},
        _count_down,
        1.5,
    ),
    Task(
        "counting",
        ("Start from {first} and count in steps of 2. Write 21 numbers.",),
        {"first": _numbers(2, 30)},
        _count_in_steps(2),
        1,
    ),
    Task(
        "counting",
        ("Start from {first} and count in steps of 5. Write 21 numbers.",),
        {"first": ("0", "5", "10", "15")},
        _count_in_steps(5),
        0.5,
    ),
    Task(
        "lists",
        ("List {list}.", "Please list {list} in order, and say which is first and last."),
        {"list": tuple(LISTS)},
        _list,
        2,
    ),
    Task(
        "lists",
        ("Write a shopping list for {dish}.", "I want to cook {dish}. What do I need to buy?"),
        {"dish": tuple(SHOPPING)},
        _shopping,
        1,
    ),
)
