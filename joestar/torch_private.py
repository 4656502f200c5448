"""All of PyTorch's private API that Joestar relies on, in one table: what another version moves is found here.

Names are imported at their first use, as some take a second: ``from joestar.torch_private import FakeTensor``.
"""

import importlib

_TABLE = {
    "torch": "sym_sqrt=_sym_sqrt sym_log2=_sym_log2 sym_cos=_sym_cos sym_sin=_sym_sin sym_tanh=_sym_tanh"
    " foreach_add=_foreach_add_ foreach_copy=_foreach_copy_ amp_update_scale=_amp_update_scale_"
    " amp_unscale=_amp_foreach_non_finite_check_and_unscale_ assume=_check",
    "torch._C": "set_grad_enabled=_set_grad_enabled driver_version=_cuda_getDriverVersion"
    " len_torch_function_stack=_len_torch_function_stack pop_torch_function_stack=_pop_torch_function_stack"
    " push_on_torch_function_stack=_push_on_torch_function_stack below_autograd=_AutoDispatchBelowAutograd"
    " after_autograd=_after_autograd_keyset any_requires_grad=_any_requires_grad"
    " transforms_active=_are_functorch_transforms_active storage_at=_construct_storage_from_data_pointer",
    "torch._C._nn": "nn_functions=",
    "torch._C._distributed_c10d": "SymmetricMemory=_SymmetricMemory",
    "torch._dispatch.python": "enable_python_dispatcher",
    "torch._dynamo": "dynamo=",
    "torch._dynamo.comptime": "comptime",
    "torch._dynamo.guards": "dynamo_guards=",
    "torch._dynamo.source": "CallFunctionNoArgsSource GlobalSource",
    "torch._dynamo.symbolic_convert": "InstructionTranslator",
    "torch._dynamo.variables.base": "VariableTracker",
    "torch._dynamo.variables.functions": "DynamoFunction=UserFunctionVariable"
    " DynamoWrapper=WrapperUserFunctionVariable",
    "torch._dynamo.variables.lists": "dynamo_lists=",
    "torch._dynamo.variables.misc": "DynamoModule=PythonModuleVariable",
    "torch._dynamo.variables.user_defined": "DynamoClass=UserDefinedClassVariable"
    " DynamoObject=UserDefinedObjectVariable",
    "torch._functorch._aot_autograd.graph_compile": "graph_compile=",
    "torch._guards": "detect_fake_mode TracingContext",
    "torch._inductor.codecache": "codecache=",
    "torch._inductor.codegen.common": "KernelTemplate",
    "torch._inductor.codegen.cpp": "CppKernel",
    "torch._inductor.compile_fx": "compile_fx=",
    "torch._inductor.config": "inductor_config=",
    "torch._inductor.cpu_vec_isa": "cpu_vec_isa=",
    "torch._inductor.custom_graph_pass": "CustomGraphPass get_hash_for_files",
    "torch._inductor.debug": "inductor_debug=",
    "torch._inductor.exc": "InductorError",
    "torch._inductor.decomposition": "select_decomp_table",
    "torch._inductor.fx_passes.joint_graph": "joint_patterns=patterns pointless_convert",
    "torch._inductor.pattern_matcher": "stable_topological_sort",
    "torch._inductor.scheduler": "SchedulerNode",
    "torch._library.autograd": "make_autograd_impl AutogradInfo=Info",
    "torch._prims_common": "contiguous_strides=make_contiguous_strides_for",
    "torch._ops": "OpOverload OpOverloadPacket HigherOrderOperator",
    "torch._subclasses": "FakeTensor FakeTensorMode",
    "torch.autograd.grad_mode": "enter_inference_mode=_enter_inference_mode exit_inference_mode=_exit_inference_mode",
    "torch.cuda": "gpu_sleep=_sleep",
    "torch.distributed._symmetric_memory": "symmetric_memory=",
    "torch.fx._lazy_graph_module": "LazyGraphModule=_LazyGraphModule",
    "torch.fx.experimental.proxy_tensor": "make_fx",
    "torch.fx.experimental.sym_node": "SymNode",
    "torch.fx.experimental.symbolic_shapes": "ShapeEnv free_unbacked_symbols statically_known_true",
    "torch.nn.functional": "functional=",
    "torch.nn.modules.batchnorm": "BatchNorm=_BatchNorm",
    "torch.nn.utils.parametrizations": "SpectralNorm=_SpectralNorm",
    "torch.optim.optimizer": "before_steps=_global_optimizer_pre_hooks after_steps=_global_optimizer_post_hooks",
    "torch.utils._device": "DeviceContext",
    "torch.utils._python_dispatch": "TorchDispatchMode",
    "torch.utils._pytree": "tree_flatten tree_leaves tree_map tree_map_only tree_unflatten",
    "torch.utils._traceback": "traceback_of_torch=",
}
"""Module -> what is read there: ``ours=theirs``, one name where they are the same, ``ours=`` for the module itself."""
NAMES = {entry.partition("=")[0]: (module, entry) for module, row in _TABLE.items() for entry in row.split()}


def __getattr__(name: str):
    if name not in NAMES:
        raise AttributeError(name)
    module, entry = NAMES[name]
    found, theirs = importlib.import_module(module), entry.rpartition("=")[2]
    globals()[name] = found = getattr(found, theirs) if theirs else found
    return found
