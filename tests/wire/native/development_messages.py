"""Messages of a development version from before version 1, as it encoded them."""

#: Requests of its workers and clients, by their numbers: what they are is in the names.
HEARTBEAT = bytes.fromhex(
    "08133201779001039a01060a0161420101a2010f0a017310011880acc7f03720072800d8018094ebdc03e00100"
)
STEAL = bytes.fromhex("080120013201778001e807900102a2010f0a017310011880acc7f03720072800")
RULES = bytes.fromhex("0823900101a201030a0173")
STATS = bytes.fromhex("0816900101")
CREATE = bytes.fromhex("08009001049a01080a01611201781a00")
PING = bytes.fromhex("0806900105")

#: Of its relay: the Steal of its peer 1, and a renewed Heartbeat.
RELAYED_STEAL = bytes.fromhex("082692032408011220") + STEAL
RENEWED = bytes.fromhex("0826900106a2030101")

#: Replies of its broker, to requests of version 1.
HEARTBEAT_REPLY = bytes.fromhex("0813c0014de00101b803b78ef1b401")
NOT_FOUND = bytes.fromhex("0805c0014d")
LIST_REPLY = bytes.fromhex("0815c0014dca01025b5d")
RELAY_ERROR = bytes.fromhex(
    "08088a012461206c6f636174696f6e206d7573742068617665203120746f2031303234206279746573c0014d"
    "a202096d616c666f726d6564"
)
