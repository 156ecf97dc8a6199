"""Names of FLUX.1 and of models with its blocks of two streams and of one."""

from quantkit.interchange.layout_rows import ADDED, BLOCK, SINGLE, Row, joined, one_row

_DOUBLE = "double_blocks.{i}"
_STREAM = "single_blocks.{i}"
_ROWS_OF_LINEAR1 = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")

_FLUX_ATTENTION = (
    one_row("img_in", "x_embedder"),
    one_row("txt_in", "context_embedder"),
    joined(f"{_DOUBLE}.img_attn.qkv", f"{BLOCK}.attn"),
    one_row(f"{_DOUBLE}.img_attn.norm.query_norm.scale", f"{BLOCK}.attn.norm_q.weight"),
    one_row(f"{_DOUBLE}.img_attn.norm.key_norm.scale", f"{BLOCK}.attn.norm_k.weight"),
    one_row(f"{_DOUBLE}.img_attn.proj", f"{BLOCK}.attn.to_out.0"),
    joined(f"{_DOUBLE}.txt_attn.qkv", f"{BLOCK}.attn", ADDED),
    one_row(f"{_DOUBLE}.txt_attn.norm.query_norm.scale", f"{BLOCK}.attn.norm_added_q.weight"),
    one_row(f"{_DOUBLE}.txt_attn.norm.key_norm.scale", f"{BLOCK}.attn.norm_added_k.weight"),
    one_row(f"{_DOUBLE}.txt_attn.proj", f"{BLOCK}.attn.to_add_out"),
    one_row(f"{_STREAM}.norm.query_norm.scale", f"{SINGLE}.attn.norm_q.weight"),
    one_row(f"{_STREAM}.norm.key_norm.scale", f"{SINGLE}.attn.norm_k.weight"),
    one_row("final_layer.linear", "proj_out"),
)

_FLUX_MLP = (
    one_row(f"{_DOUBLE}.img_mlp.0", f"{BLOCK}.ff.net.0.proj"),
    one_row(f"{_DOUBLE}.img_mlp.2", f"{BLOCK}.ff.net.2"),
    one_row(f"{_DOUBLE}.txt_mlp.0", f"{BLOCK}.ff_context.net.0.proj"),
    one_row(f"{_DOUBLE}.txt_mlp.2", f"{BLOCK}.ff_context.net.2"),
    joined(f"{_STREAM}.linear1", SINGLE, _ROWS_OF_LINEAR1),
    one_row(f"{_STREAM}.linear2", f"{SINGLE}.proj_out"),
)

FLUX = (
    *_FLUX_ATTENTION,
    *_FLUX_MLP,
    one_row("time_in.in_layer", "time_text_embed.timestep_embedder.linear_1"),
    one_row("time_in.out_layer", "time_text_embed.timestep_embedder.linear_2"),
    one_row("vector_in.in_layer", "time_text_embed.text_embedder.linear_1"),
    one_row("vector_in.out_layer", "time_text_embed.text_embedder.linear_2"),
    one_row("guidance_in.in_layer", "time_text_embed.guidance_embedder.linear_1"),
    one_row("guidance_in.out_layer", "time_text_embed.guidance_embedder.linear_2"),
    one_row(f"{_DOUBLE}.img_mod.lin", f"{BLOCK}.norm1.linear"),
    one_row(f"{_DOUBLE}.txt_mod.lin", f"{BLOCK}.norm1_context.linear"),
    one_row(f"{_STREAM}.modulation.lin", f"{SINGLE}.norm.linear"),
    Row("final_layer.adaLN_modulation.1", ("norm_out.linear",), swapped="always"),
)

_GUIDANCE = "distilled_guidance_layer"

CHROMA = (
    *_FLUX_ATTENTION,
    *_FLUX_MLP,
    one_row(f"{_GUIDANCE}.in_proj", f"{_GUIDANCE}.in_proj"),
    one_row(f"{_GUIDANCE}.layers.{{i}}.in_layer", f"{_GUIDANCE}.layers.{{i}}.linear_1"),
    one_row(f"{_GUIDANCE}.layers.{{i}}.out_layer", f"{_GUIDANCE}.layers.{{i}}.linear_2"),
    one_row(f"{_GUIDANCE}.norms.{{i}}.scale", f"{_GUIDANCE}.norms.{{i}}.weight"),
    one_row(f"{_GUIDANCE}.out_proj", f"{_GUIDANCE}.out_proj"),
)

FLUX2 = (
    *_FLUX_ATTENTION,
    one_row(f"{_DOUBLE}.img_mlp.0", f"{BLOCK}.ff.linear_in"),
    one_row(f"{_DOUBLE}.img_mlp.2", f"{BLOCK}.ff.linear_out"),
    one_row(f"{_DOUBLE}.txt_mlp.0", f"{BLOCK}.ff_context.linear_in"),
    one_row(f"{_DOUBLE}.txt_mlp.2", f"{BLOCK}.ff_context.linear_out"),
    # Joined in diffusers, too.
    one_row(f"{_STREAM}.linear1", f"{SINGLE}.attn.to_qkv_mlp_proj"),
    one_row(f"{_STREAM}.linear2", f"{SINGLE}.attn.to_out"),
    one_row("time_in.in_layer", "time_guidance_embed.timestep_embedder.linear_1"),
    one_row("time_in.out_layer", "time_guidance_embed.timestep_embedder.linear_2"),
    one_row("guidance_in.in_layer", "time_guidance_embed.guidance_embedder.linear_1"),
    one_row("guidance_in.out_layer", "time_guidance_embed.guidance_embedder.linear_2"),
    one_row("double_stream_modulation_img.lin", "double_stream_modulation_img.linear"),
    one_row("double_stream_modulation_txt.lin", "double_stream_modulation_txt.linear"),
    one_row("single_stream_modulation.lin", "single_stream_modulation.linear"),
    Row("final_layer.adaLN_modulation.1", ("norm_out.linear",), swapped="always"),
)

_REFINER = "txt_in.individual_token_refiner.blocks.{i}"
_REFINED = "context_embedder.token_refiner.refiner_blocks.{i}"
_TEXT = "context_embedder.time_text_embed"

HUNYUAN_VIDEO = (
    one_row("img_in.proj", "x_embedder.proj"),
    one_row("time_in.mlp.0", "time_text_embed.timestep_embedder.linear_1"),
    one_row("time_in.mlp.2", "time_text_embed.timestep_embedder.linear_2"),
    one_row("vector_in.in_layer", "time_text_embed.text_embedder.linear_1"),
    one_row("vector_in.out_layer", "time_text_embed.text_embedder.linear_2"),
    one_row("guidance_in.mlp.0", "time_text_embed.guidance_embedder.linear_1"),
    one_row("guidance_in.mlp.2", "time_text_embed.guidance_embedder.linear_2"),
    one_row("txt_in.input_embedder", "context_embedder.proj_in"),
    one_row("txt_in.t_embedder.mlp.0", f"{_TEXT}.timestep_embedder.linear_1"),
    one_row("txt_in.t_embedder.mlp.2", f"{_TEXT}.timestep_embedder.linear_2"),
    one_row("txt_in.c_embedder.{rest}", f"{_TEXT}.text_embedder.{{rest}}"),
    joined(f"{_REFINER}.self_attn_qkv", f"{_REFINED}.attn"),
    one_row(f"{_REFINER}.self_attn_proj", f"{_REFINED}.attn.to_out.0"),
    one_row(f"{_REFINER}.norm1", f"{_REFINED}.norm1"),
    one_row(f"{_REFINER}.norm2", f"{_REFINED}.norm2"),
    one_row(f"{_REFINER}.mlp.fc1", f"{_REFINED}.ff.net.0.proj"),
    one_row(f"{_REFINER}.mlp.fc2", f"{_REFINED}.ff.net.2"),
    # Two gates, in the same order.
    one_row(f"{_REFINER}.adaLN_modulation.1", f"{_REFINED}.norm_out.linear"),
    joined(f"{_DOUBLE}.img_attn_qkv", f"{BLOCK}.attn"),
    one_row(f"{_DOUBLE}.img_attn_q_norm", f"{BLOCK}.attn.norm_q"),
    one_row(f"{_DOUBLE}.img_attn_k_norm", f"{BLOCK}.attn.norm_k"),
    one_row(f"{_DOUBLE}.img_attn_proj", f"{BLOCK}.attn.to_out.0"),
    one_row(f"{_DOUBLE}.img_mod.linear", f"{BLOCK}.norm1.linear"),
    one_row(f"{_DOUBLE}.img_mlp.fc1", f"{BLOCK}.ff.net.0.proj"),
    one_row(f"{_DOUBLE}.img_mlp.fc2", f"{BLOCK}.ff.net.2"),
    joined(f"{_DOUBLE}.txt_attn_qkv", f"{BLOCK}.attn", ADDED),
    one_row(f"{_DOUBLE}.txt_attn_q_norm", f"{BLOCK}.attn.norm_added_q"),
    one_row(f"{_DOUBLE}.txt_attn_k_norm", f"{BLOCK}.attn.norm_added_k"),
    one_row(f"{_DOUBLE}.txt_attn_proj", f"{BLOCK}.attn.to_add_out"),
    one_row(f"{_DOUBLE}.txt_mod.linear", f"{BLOCK}.norm1_context.linear"),
    one_row(f"{_DOUBLE}.txt_mlp.fc1", f"{BLOCK}.ff_context.net.0.proj"),
    one_row(f"{_DOUBLE}.txt_mlp.fc2", f"{BLOCK}.ff_context.net.2"),
    joined(f"{_STREAM}.linear1", SINGLE, _ROWS_OF_LINEAR1),
    one_row(f"{_STREAM}.linear2", f"{SINGLE}.proj_out"),
    one_row(f"{_STREAM}.q_norm", f"{SINGLE}.attn.norm_q"),
    one_row(f"{_STREAM}.k_norm", f"{SINGLE}.attn.norm_k"),
    one_row(f"{_STREAM}.modulation.linear", f"{SINGLE}.norm.linear"),
    one_row("final_layer.linear", "proj_out"),
    Row("final_layer.adaLN_modulation.1", ("norm_out.linear",), swapped="always"),
)
