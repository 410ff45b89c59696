"""What the easy text knows: countries, animals, colours, lists and dishes."""

# country -> capital, region, river, language, sight, dish
COUNTRIES = {
    "France": ("Paris", "western Europe", "Seine", "French", "the Eiffel Tower", "onion soup"),
    "Italy": ("Rome", "southern Europe", "Tiber", "Italian", "the Colosseum", "pasta"),
    "Egypt": ("Cairo", "northern Africa", "Nile", "Arabic", "the pyramids", "bean stew"),
    "England": (
        "London",
        "western Europe",
        "Thames",
        "English",
        "the Tower Bridge",
        "fish and chips",
    ),
    "Austria": ("Vienna", "central Europe", "Danube", "German", "the opera house", "apple cake"),
    "Germany": ("Berlin", "central Europe", "Spree", "German", "the old city gate", "potato salad"),
    "Portugal": (
        "Lisbon",
        "southern Europe",
        "Tagus",
        "Portuguese",
        "the yellow trams",
        "grilled fish",
    ),
    "Poland": ("Warsaw", "central Europe", "Vistula", "Polish", "the royal castle", "dumplings"),
    "Iraq": ("Baghdad", "western Asia", "Tigris", "Arabic", "the old market", "rice with lamb"),
    "Thailand": (
        "Bangkok",
        "southern Asia",
        "Chao Phraya",
        "Thai",
        "the golden temples",
        "noodles",
    ),
    "Spain": (
        "Madrid",
        "southern Europe",
        "Manzanares",
        "Spanish",
        "the great museum",
        "rice with fish",
    ),
    "Japan": ("Tokyo", "eastern Asia", "Sumida", "Japanese", "the cherry trees", "rice and fish"),
}

# animal -> kind, home, food, cover, young
ANIMALS = {
    "lion": ("mammal", "on the plains of Africa", "meat", "yellow fur", "cub"),
    "penguin": (
        "bird",
        "on the cold coast of the south",
        "fish",
        "black and white feathers",
        "chick",
    ),
    "horse": ("mammal", "on farms and in open fields", "grass and hay", "short brown hair", "foal"),
    "owl": ("bird", "in old trees and barns", "mice", "soft brown feathers", "chick"),
    "frog": ("amphibian", "near ponds and rivers", "flies", "smooth green skin", "tadpole"),
    "bear": ("mammal", "in large forests", "fish and berries", "thick brown fur", "cub"),
    "duck": (
        "bird",
        "on lakes and ponds",
        "plants and snails",
        "feathers that keep out water",
        "chick",
    ),
    "sheep": ("mammal", "on farms and green hills", "grass", "thick white wool", "lamb"),
    "snake": ("reptile", "in grass and under stones", "mice and eggs", "dry scales", "snakelet"),
    "eagle": (
        "bird",
        "on high rocks and mountains",
        "fish and rabbits",
        "dark brown feathers",
        "chick",
    ),
}

# colour -> things that have it
COLOURS = {
    "red": ("a ripe tomato", "a fire engine", "a strawberry", "a stop sign"),
    "green": ("a frog", "fresh grass", "a cucumber", "a leaf in spring"),
    "yellow": ("a lemon", "a banana", "the sun at noon", "a sunflower"),
    "white": ("fresh snow", "a glass of milk", "a swan", "a sheet of paper"),
    "blue": ("the sky on a clear day", "the deep sea", "a blueberry", "a pair of jeans"),
    "orange": ("a carrot", "a pumpkin", "a ripe orange", "the sky at sunset"),
}

# two colours -> what they give when mixed
MIXTURES = {
    "blue and yellow": "green",
    "red and yellow": "orange",
    "red and blue": "purple",
    "red and white": "pink",
    "black and white": "grey",
}

# name of a list -> its members in order
LISTS = {
    "the days of the week": "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday",
    "the months of the year": (
        "January, February, March, April, May, June, July, August, "
        "September, October, November, December"
    ),
    "the planets of the solar system": (
        "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune"
    ),
    "the letters of the alphabet": (
        "A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z"
    ),
    "the colours of the rainbow": "red, orange, yellow, green, blue, indigo, violet",
    "the seasons of the year": "spring, summer, autumn, winter",
    "the continents": "Africa, Antarctica, Asia, Australia, Europe, North America, South America",
}

# dish -> ingredients
SHOPPING = {
    "vegetable soup": ("three carrots", "two onions", "four potatoes", "one leek", "some salt"),
    "pancakes": ("two eggs", "some flour", "some milk", "some butter", "some sugar"),
    "fruit salad": ("three apples", "two bananas", "two oranges", "some grapes", "one lemon"),
    "tomato pasta": ("a bag of pasta", "six tomatoes", "one onion", "some cheese", "some oil"),
}
