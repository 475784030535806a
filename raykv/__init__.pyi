from raykv.base.version import __version__ as __version__
from raykv.client.capacity import Plan as Plan
from raykv.client.cluster import Cluster as Cluster
from raykv.client.cluster import clear as clear
from raykv.client.cluster import connect as connect
from raykv.client.cluster import events as events
from raykv.client.cluster import hidden_states as hidden_states
from raykv.node.states.file import HiddenStates as HiddenStates
from raykv.node.states.file import cleanup_hidden_states as cleanup_hidden_states
from raykv.node.states.file import load_hidden_states as load_hidden_states
from raykv.prompts.block_hashes import PromptTraits as PromptTraits
from raykv.protocol.events import BlockRemoved as BlockRemoved
from raykv.protocol.events import BlockStored as BlockStored
from raykv.protocol.events import CacheCleared as CacheCleared
from raykv.protocol.events import Event as Event
from raykv.protocol.events import EventsMissed as EventsMissed
from raykv.protocol.events import LifeBegan as LifeBegan
from raykv.protocol.events import NodeJoined as NodeJoined
from raykv.protocol.events import NodeLost as NodeLost
from raykv.protocol.reader import Chunk as Chunk
from raykv.protocol.reader import PromptLookup as PromptLookup
from raykv.serve.plan import plan as plan
from raykv.stream.replay import Replay as Replay

__all__: list[str]
