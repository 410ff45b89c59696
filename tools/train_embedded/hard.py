"""Hard text: stories and poems whose words are bound to a name, a thing and a place named earlier.

What happens in a story is looked up in fixed tables keyed on (name, thing), (name, place) and
(place, thing), and so is the wording of each sentence. The tables are random but never change: a
model with enough room and steps learns them and is sure of every word; one that saw few stories
can only guess. Independent random words would not do: both models would know the distribution they
are drawn from, and agree. What is chosen early is repeated later (a friend, a colour), so local
context does not help either.
"""

import random
from collections.abc import Sequence

from tools.train_embedded.tasks import Task, Values

TABLE_SEED = 20  # changing it rewrites every story

NAMES = {
    "Mara": "she",
    "Tobin": "he",
    "Ines": "she",
    "Oskar": "he",
    "Lila": "she",
    "Bram": "he",
    "Greta": "she",
    "Hugo": "he",
    "Petra": "she",
    "Jonas": "he",
    "Vera": "she",
    "Milo": "he",
}
ROLES = (
    "lighthouse keeper",
    "baker",
    "clockmaker",
    "shepherd",
    "painter",
    "gardener",
    "weaver",
    "beekeeper",
)
THINGS = ("compass", "lantern", "letter", "key", "violin", "map", "ring", "kite", "bell", "mirror")
PLACES = (
    "harbour",
    "forest",
    "mill",
    "market",
    "island",
    "castle",
    "village",
    "valley",
    "tower",
    "garden",
)

COLOURS = ("silver", "golden", "crimson", "dark", "pale", "green", "copper", "blue")
FRIENDS = ("Anton", "Bella", "Cora", "Dario", "Elsa", "Finn", "Gwen", "Henrik")
ANIMALS = ("fox", "heron", "goat", "raven", "wolf", "hare", "badger", "cat")
WEATHERS = ("rain", "fog", "snow", "hail", "mist", "frost", "sleet", "drizzle")
TIMES = ("morning", "evening", "winter", "autumn", "night", "spring", "summer", "dawn")
SPOTS = ("bridge", "well", "cave", "chapel", "barn", "river", "wall", "orchard")
FEELINGS = ("brave", "lonely", "proud", "tired", "happy", "restless", "calm", "worried")
GIFTS = ("bread", "honey", "apples", "cheese", "soup", "tea", "plums", "cake")

PRONOUNS = {"she": ("she", "her", "She", "Her"), "he": ("he", "his", "He", "His")}


def look_up(table: str, key: Sequence[str], choices: Sequence[str]) -> str:
    """The fixed entry of a seeded table: the same key always gives the same word."""
    return random.Random(f"{TABLE_SEED}|{table}|{'|'.join(key)}").choice(choices)


def _bindings(name: str, thing: str, place: str) -> dict[str, str]:
    """Every word that the three given words decide."""
    friend = look_up("friend", (name, place), FRIENDS)
    he, his, upper_he, upper_his = PRONOUNS[NAMES[name]]
    return {
        "name": name,
        "thing": thing,
        "place": place,
        "friend": friend,
        "he": he,
        "his": his,
        "He": upper_he,
        "His": upper_his,
        "colour": look_up("colour", (name, thing), COLOURS),
        "animal": look_up("animal", (friend,), ANIMALS),
        "weather": look_up("weather", (place, thing), WEATHERS),
        "time": look_up("time", (name,), TIMES),
        "spot": look_up("spot", (place, thing), SPOTS),
        "feeling": look_up("feeling", (name, thing), FEELINGS),
        "gift": look_up("gift", (name, place), GIFTS),
        "hider": look_up("hider", (thing,), ANIMALS),
    }


# One tuple per sentence of a story, four wordings each.
STORY = (
    (
        "One {time}, {feeling} {name} the {role} lost {his} {colour} {thing} near the {spot}.",
        (
            "{name} the {role} had a {colour} {thing}, until it vanished in the {weather} by the "
            "{spot}."
        ),
        "The {colour} {thing} of {name} the {role} was gone, and {weather} lay over the {place}.",
        "In the {place}, {weather} fell, and {name} the {role} felt {feeling} without the {thing}.",
    ),
    (
        "{He} asked {friend} and the {animal}, who knew the {spot} well.",
        "{friend} came with the {animal} and some {gift}, and {he} told them everything.",
        "Only {friend} heard {him}, and the {animal} brought {gift}.",
        "So {friend}, the {animal} and {he} set out for the {spot} before {time}.",
    ),
    (
        "A {hider} had taken the {thing} to the {spot}, {friend} said.",
        "By {time} the {animal} saw a {colour} light at the {spot}.",
        "They followed a {hider} through the {weather}, and {friend} felt {feeling}.",
        "At the {spot} they found {gift}, a {hider}, and no {thing}.",
    ),
    (
        "{name} gave the {hider} some {gift}, and there lay the {colour} {thing}.",
        (
            "Then the {animal} dug beside the {spot}, and {friend} cried that the {thing} was "
            "{colour}."
        ),
        '"Look," said {friend}, "the {colour} {thing} is under the {spot}."',
        "The {hider} was {feeling} too, so {name} shared the {gift} with it.",
    ),
    (
        "Since that {time}, {name} the {role} and {friend} keep the {thing} in the {place}.",
        (
            "{friend} and the {animal} went home through the {weather}, and {name} was {feeling} "
            "no more."
        ),
        "In the {place} they still tell of {name}, {friend} and the {colour} {thing}.",
        "Every {time}, {friend} brings {gift} to {name}, and the {animal} guards the {thing}.",
    ),
)
# Which words of the prompt decide the wording of each sentence.
STORY_KEYS = (
    ("name", "place"),
    ("name", "thing"),
    ("place", "thing"),
    ("name", "place"),
    ("name", "thing"),
)

# Couplets; the wording of each depends on two words of the prompt.
POEM = (
    (
        "The {weather} comes down on the {place} tonight,\nand {name} sees a {colour} light.",
        "{colour_} is the {thing}, and {weather} fills the sky,\nand {name} hears a {animal} cry.",
        "O {name}, {feeling} in the {place} by the sea,\nthe {thing} lies under the {colour} tree.",
        "When {time} is over and {weather} is here,\nthe {animal} of {friend} draws near.",
    ),
    (
        (
            "{friend} waits with {gift} at the {spot} by the hill,\n"
            "the {hider} is {feeling}, the {place} is still."
        ),
        "A {hider} runs by with the {thing} in the snow,\nand only {friend} and {name} know.",
        "{gift_} for {friend} and a song for the {animal},\nthe {spot} is as {colour} as a candle.",
        "The {spot} has a secret that {friend} must keep,\nthe {hider} and {animal} are asleep.",
    ),
    (
        (
            "So {name} takes the {thing} in the {time} of the year,\n"
            "and {friend} the {feeling} has nothing to fear."
        ),
        (
            "And still in the {place} when the {weather} is long,\n"
            "the {thing} of {name} sings a {colour} song."
        ),
        "Goodbye to the {hider}, goodbye to the {spot},\nthe {gift} of {friend} is never forgot.",
        (
            "Now {feeling} and {colour} the {time} may end,\n"
            "for {name} and the {animal} have {friend}."
        ),
    ),
)
POEM_KEYS = (("name", "thing"), ("name", "place"), ("place", "thing"))


def _compose(
    values: Values,
    sentences: Sequence[Sequence[str]],
    keys: Sequence[Sequence[str]],
    separator: str,
) -> str:
    bound = _bindings(values["name"], values["thing"], values["place"])
    bound |= {
        "role": values.get("role", ""),
        "him": "her" if bound["he"] == "she" else "him",
        "colour_": bound["colour"].capitalize(),
        "gift_": bound["gift"].capitalize(),
    }
    parts = []
    for index, (wordings, key) in enumerate(zip(sentences, keys, strict=True)):
        table = f"{separator!r}{index}"
        wording = look_up(table, [values[word] for word in key], wordings)
        parts.append(wording.format(**bound))
    return separator.join(parts)


def _story(values: Values, _: random.Random) -> str:
    return _compose(values, STORY, STORY_KEYS, " ")


def _poem(values: Values, _: random.Random) -> str:
    return _compose(values, POEM, POEM_KEYS, "\n")


STORY_PROMPTS = (
    "Write a story about {name} the {role} and the lost {thing} in the {place}.",
    "Tell me a short story set in the {place}. "
    "{name} the {role} looks for a lost {thing}, and a friend helps.",
    "A {thing} is missing in the {place}. Write the story of how {name} the {role} finds it.",
)
POEM_PROMPTS = (
    "Write a poem about {name} and the {thing} in the {place}.",
    "Write six lines of verse in rhyme. "
    "They are about {name}, a {thing}, and the {place} where both are at home.",
)
BLANKS = {"name": tuple(NAMES), "thing": THINGS, "place": PLACES}

HARD_TASKS = (
    Task("story", STORY_PROMPTS, {"name": tuple(NAMES), "role": ROLES, **BLANKS}, _story, 2),
    Task("poem", POEM_PROMPTS, BLANKS, _poem, 1),
)
