"""A serving plan as files for third-party engines and routers.

processes  the processes of each replica: machine, GPUs, ports
vllm       their command lines for vLLM, and its router's
sglang     the same for SGLang
ours       command lines of `serve` and `route`, for what no engine runs
pods       Kubernetes objects for llm-d and Dynamo
skypilot   a SkyServe service, where a fleet is one
folder     the scripts of a fleet, and the weights of its routes
"""
