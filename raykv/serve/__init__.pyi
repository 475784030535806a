from .app import build_app as build_app
from .command import serve as serve
from .disaggregated.app import build_disaggregated_app as build_disaggregated_app
from .llm import build_openai_app as build_openai_app
from .llm import build_pd_openai_app as build_pd_openai_app
