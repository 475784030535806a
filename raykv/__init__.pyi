from .base.version import __version__ as __version__
from .client.capacity import Plan as Plan
from .client.cluster import Cluster as Cluster
from .client.cluster import clear as clear
from .client.cluster import connect as connect
from .client.cluster import events as events
from .client.cluster import hidden_states as hidden_states
from .node.states.file import HiddenStates as HiddenStates
from .node.states.file import cleanup_hidden_states as cleanup_hidden_states
from .node.states.file import load_hidden_states as load_hidden_states
from .prompts.block_hashes import PromptTraits as PromptTraits
from .protocol.events import BlockRemoved as BlockRemoved
from .protocol.events import BlockStored as BlockStored
from .protocol.events import CacheCleared as CacheCleared
from .protocol.events import Event as Event
from .protocol.events import EventsMissed as EventsMissed
from .protocol.events import LifeBegan as LifeBegan
from .protocol.events import NodeJoined as NodeJoined
from .protocol.events import NodeLost as NodeLost
from .protocol.reader import Chunk as Chunk
from .protocol.reader import PromptLookup as PromptLookup
from .serve.plan import plan as plan
from .stream.replay import Replay as Replay

__all__: list[str]
