"""Word lists of the demo curriculum.

Every list is closed, so that the 4,096-entry tokenizer can hold each word as one token. `curriculum.py` is the only reader.
"""

PEOPLE = """Anna Ben Clara David Emma Felix Grace Hugo Iris Jack Kate Leo Mia Noah Olga Paul Quinn Rosa Sam Tara Umar Vera
Will Xenia Yara Zoe Alice Boris Carl Diana Erik Fiona George Hannah Ivan Julia Kevin Laura Marco Nina Oscar Petra Ralf
Sofia Tom Ursula Victor Wendy Adam Bella Chloe Daniel Elena Frank Gina Henry Ida Jonas""".split()

CITIES = """Oslo Paris Rome Berlin Madrid Lisbon Vienna Prague Dublin London Athens Cairo Tokyo Kyoto Delhi Lima Quito
Boston Denver Chicago Toronto Sydney Nairobi Accra Tunis Riga Zurich Geneva Milan Porto Bergen Turin Malmo Krakow
Seoul Hanoi Manila Havana Bogota Dallas""".split()

COLORS = """red blue green yellow black white brown pink purple orange grey silver golden violet crimson amber ivory
scarlet teal olive""".split()

ANIMALS = """fox dog cat horse rabbit owl bear wolf mouse tiger lion goat sheep duck goose eagle crow frog turtle whale
shark otter badger deer donkey camel zebra panda koala monkey snake lizard beaver hedgehog squirrel sparrow parrot
penguin seal crab moth bee ant spider snail raven falcon swan heron toad""".split()

OBJECTS = """lantern key book map coin ring bell lamp mirror clock drum kite rope basket bottle candle hammer shovel
ladder bucket blanket pillow button ribbon feather shell stone pearl whistle compass flute scarf boot hat glove cup
plate spoon kettle broom""".split()

PLACES = """forest garden valley castle harbor meadow desert village tower cave island river bridge market barn attic
cellar library school mill""".split()

FRUITS = """apple banana cherry grape lemon mango melon peach pear plum fig lime kiwi papaya apricot""".split()

WORDS = sorted(set(ANIMALS + OBJECTS + FRUITS + """cloud storm rain snow wind river ocean hill rock sand tree leaf root seed
flower grass bread cheese honey sugar salt soup tea milk table chair door window wall floor roof house road train boat
wagon wheel engine paper pencil letter picture music dance song night morning summer winter autumn spring friend
brother sister king queen pirate knight wizard dragon giant""".split()))

LANGUAGES = "French German Spanish Italian Dutch Greek Polish Danish Turkish Finnish".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = """January February March April May June July August September October November December""".split()
JOBS = "baker doctor teacher farmer pilot sailor painter singer lawyer nurse builder gardener writer cook".split()
SKIES = "sunny cloudy rainy windy snowy foggy stormy clear".split()
ROOMS = "kitchen bedroom bathroom hallway office garage attic cellar garden".split()
TRAITS = "brave clever curious quiet gentle hungry lucky tiny proud sleepy".split()

SYLLABLES = """ba be bi bo bu ca co cu da de di do du fa fe fi fo ga go gu ha he hi ho ja jo ka ke ki ko la le li lo lu ma me
mi mo mu na ne ni no nu pa pe pi po pu ra re ri ro ru sa se si so su ta te ti to tu va ve vi vo wa we wi wo ya yo za ze
zi zo zu an en in on un ar er or ul el al""".split()

def person(r):
    """A name, mostly from the list, sometimes made up so that unknown names work too."""
    if r.random() < 0.8:
        return r.choice(PEOPLE)
    return "".join(r.choice(SYLLABLES) for _ in range(r.randint(2, 3))).title()


SYSTEMS = """You are a helpful assistant.
You are Lily, a small and friendly assistant.
Answer briefly.
Answer the question and nothing else.
You are a careful assistant. Be short and exact.
Help the user with the task.
You are a demo model. Do what the user asks.
Be polite and clear.
You work in a small office and help with lists and numbers.
Reply with the answer only.
Keep your answers short.
You are an assistant for {person}.
The user is called {person}.
Today is {day}.
Today is {day}, {number} {month}.
You are a helpful assistant in {city}.
The user lives in {city} and works as a {job}.
You help {person} in {city}. Answer briefly.""".split("\n")
