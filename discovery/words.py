"""256 words, one for each value of a byte, in which people compare a fingerprint aloud."""

from __future__ import annotations

_TEXT = """
acorn agent amber anchor angle apple apron arrow aspen atlas attic autumn bacon badge bakery bamboo banjo barrel
basket beacon beaver berry bishop blanket blossom border bottle branch bridge bronze bucket butter button cabin
cactus camel candle canoe canvas carbon carpet castle cedar cellar cello chalk cherry chimney circus clover cobalt
coffee comet copper coral corner cotton cradle crayon cricket crystal cushion daisy dancer denim desert diamond
dinner dolphin donkey dragon drawer eagle easel echo elbow elephant ember engine evening fabric falcon farmer
feather fence ferry fiddle finger flame flute forest fossil fountain galaxy garden garlic ginger glacier glove
goblet granite grape guitar hammer harbor harvest hazel helmet hermit hollow honey horizon hunter icicle igloo
indigo island ivory jacket jaguar jasmine jersey jigsaw jungle juniper kayak kernel kettle kitchen kite ladder
lagoon lantern lemon leopard letter library lilac linen lizard lobster locket lotus lumber magnet mango maple marble
meadow medal melon mirror mitten monkey mosaic mountain muffin museum mustard napkin nectar needle nickel noodle
nutmeg oasis ocean olive onion opal orange orchard otter oyster paddle palace panda paper parrot pasta pebble
pelican pencil pepper piano pigeon pillow pirate planet plaza pocket pony poppy potato prism puzzle quartz quilt
rabbit radio raven ribbon river robin rocket rubber saddle saffron salmon sandal satin scarf sculptor shadow shovel
silver singer spider spruce stable statue summer sunset tailor tango teapot temple thistle thunder ticket tiger
timber tomato topaz tower trumpet tulip tunnel turtle umbrella uncle valley vanilla velvet village vinegar violin
volcano voyage waffle wagon walnut walrus warden whisper willow
"""

WORDS = tuple(_TEXT.split())
