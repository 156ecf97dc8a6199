"""Names of other transformers."""

from quantkit.interchange.layout_rows import ADDED, BLOCK, SINGLE, Row, joined, one_row, renamed

SD3 = (
    one_row("x_embedder.proj", "pos_embed.proj"),
    one_row("pos_embed", "pos_embed.pos_embed"),
    one_row("t_embedder.mlp.0", "time_text_embed.timestep_embedder.linear_1"),
    one_row("t_embedder.mlp.2", "time_text_embed.timestep_embedder.linear_2"),
    one_row("y_embedder.mlp.0", "time_text_embed.text_embedder.linear_1"),
    one_row("y_embedder.mlp.2", "time_text_embed.text_embedder.linear_2"),
    one_row("context_embedder", "context_embedder"),
    joined("joint_blocks.{i}.x_block.attn.qkv", f"{BLOCK}.attn"),
    one_row("joint_blocks.{i}.x_block.attn.ln_q", f"{BLOCK}.attn.norm_q"),
    one_row("joint_blocks.{i}.x_block.attn.ln_k", f"{BLOCK}.attn.norm_k"),
    one_row("joint_blocks.{i}.x_block.attn.proj", f"{BLOCK}.attn.to_out.0"),
    joined("joint_blocks.{i}.x_block.attn2.qkv", f"{BLOCK}.attn2"),
    one_row("joint_blocks.{i}.x_block.attn2.ln_q", f"{BLOCK}.attn2.norm_q"),
    one_row("joint_blocks.{i}.x_block.attn2.ln_k", f"{BLOCK}.attn2.norm_k"),
    one_row("joint_blocks.{i}.x_block.attn2.proj", f"{BLOCK}.attn2.to_out.0"),
    one_row("joint_blocks.{i}.x_block.mlp.fc1", f"{BLOCK}.ff.net.0.proj"),
    one_row("joint_blocks.{i}.x_block.mlp.fc2", f"{BLOCK}.ff.net.2"),
    one_row("joint_blocks.{i}.x_block.adaLN_modulation.1", f"{BLOCK}.norm1.linear"),
    joined("joint_blocks.{i}.context_block.attn.qkv", f"{BLOCK}.attn", ADDED),
    one_row("joint_blocks.{i}.context_block.attn.ln_q", f"{BLOCK}.attn.norm_added_q"),
    one_row("joint_blocks.{i}.context_block.attn.ln_k", f"{BLOCK}.attn.norm_added_k"),
    one_row("joint_blocks.{i}.context_block.attn.proj", f"{BLOCK}.attn.to_add_out"),
    one_row("joint_blocks.{i}.context_block.mlp.fc1", f"{BLOCK}.ff_context.net.0.proj"),
    one_row("joint_blocks.{i}.context_block.mlp.fc2", f"{BLOCK}.ff_context.net.2"),
    # The last block only scales and shifts the prompt, in diffusers the other way round.
    Row(
        "joint_blocks.{i}.context_block.adaLN_modulation.1",
        (f"{BLOCK}.norm1_context.linear",),
        swapped="last",
    ),
    one_row("final_layer.linear", "proj_out"),
    Row("final_layer.adaLN_modulation.1", ("norm_out.linear",), swapped="always"),
)

_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "norm_q": "norm_q",
              "norm_k": "norm_k", "k_img": "add_k_proj", "v_img": "add_v_proj",
              "norm_k_img": "norm_added_k"}  # fmt: skip
WAN = (
    one_row("patch_embedding", "patch_embedding"),
    one_row("time_embedding.0", "condition_embedder.time_embedder.linear_1"),
    one_row("time_embedding.2", "condition_embedder.time_embedder.linear_2"),
    one_row("time_projection.1", "condition_embedder.time_proj"),
    one_row("text_embedding.0", "condition_embedder.text_embedder.linear_1"),
    one_row("text_embedding.2", "condition_embedder.text_embedder.linear_2"),
    one_row("img_emb.proj.0", "condition_embedder.image_embedder.norm1"),
    one_row("img_emb.proj.1", "condition_embedder.image_embedder.ff.net.0.proj"),
    one_row("img_emb.proj.3", "condition_embedder.image_embedder.ff.net.2"),
    one_row("img_emb.proj.4", "condition_embedder.image_embedder.norm2"),
    *renamed("blocks.{i}.self_attn", "blocks.{i}.attn1", _ATTENTION),
    *renamed("blocks.{i}.cross_attn", "blocks.{i}.attn2", _ATTENTION),
    one_row("blocks.{i}.norm3", "blocks.{i}.norm2"),
    one_row("blocks.{i}.ffn.0", "blocks.{i}.ffn.net.0.proj"),
    one_row("blocks.{i}.ffn.2", "blocks.{i}.ffn.net.2"),
    one_row("blocks.{i}.modulation", "blocks.{i}.scale_shift_table"),
    one_row("head.modulation", "scale_shift_table"),
    one_row("head.head", "proj_out"),
)

SAME = one_row("{rest}", "{rest}")
LTX = (
    one_row("patchify_proj", "proj_in"),
    one_row("adaln_single.{rest}", "time_embed.{rest}"),
    *(
        one_row(f"{BLOCK}.attn{x}.{name}_norm", f"{BLOCK}.attn{x}.norm_{name}")
        for x in (1, 2)
        for name in "qk"
    ),
    SAME,
)

_STAGES = ("layers.{i}", "noise_refiner.{i}", "context_refiner.{i}")


def _stage_attention(stage: str, attention: str) -> tuple[Row, ...]:
    return (
        joined(f"{stage}.attention.qkv", f"{stage}.{attention}"),
        one_row(f"{stage}.attention.q_norm", f"{stage}.{attention}.norm_q"),
        one_row(f"{stage}.attention.k_norm", f"{stage}.{attention}.norm_k"),
        one_row(f"{stage}.attention.out", f"{stage}.{attention}.to_out.0"),
    )


Z_IMAGE = (
    *(row for stage in _STAGES for row in _stage_attention(stage, "attention")),
    *(one_row(f"{stage}.{{rest}}", f"{stage}.{{rest}}") for stage in _STAGES),
    # diffusers tells embedders by their patches: 2 x 2 pixels of 1 frame are all that files have.
    one_row("x_embedder", "all_x_embedder.2-1"),
    one_row("final_layer.{rest}", "all_final_layer.2-1.{rest}"),
    one_row("t_embedder.{rest}", "t_embedder.{rest}"),
    one_row("cap_embedder.{rest}", "cap_embedder.{rest}"),
    one_row("x_pad_token", "x_pad_token"),
    one_row("cap_pad_token", "cap_pad_token"),
)

_LUMINA2_STAGE = {
    "feed_forward.w1": "feed_forward.linear_1",
    "feed_forward.w2": "feed_forward.linear_2",
    "feed_forward.w3": "feed_forward.linear_3",
    "adaLN_modulation.1": "norm1.linear",
    "attention_norm2": "norm2",
    "ffn_norm1": "ffn_norm1",
    "ffn_norm2": "ffn_norm2",
}
_CAPTION = "time_caption_embed.caption_embedder"

LUMINA2 = (
    *(row for stage in _STAGES for row in _stage_attention(stage, "attn")),
    *(row for stage in _STAGES for row in renamed(stage, stage, _LUMINA2_STAGE)),
    one_row("layers.{i}.attention_norm1", "layers.{i}.norm1.norm"),
    one_row("noise_refiner.{i}.attention_norm1", "noise_refiner.{i}.norm1.norm"),
    # Which has no modulation.
    one_row("context_refiner.{i}.attention_norm1", "context_refiner.{i}.norm1"),
    one_row("x_embedder", "x_embedder"),
    one_row("t_embedder.mlp.0", "time_caption_embed.timestep_embedder.linear_1"),
    one_row("t_embedder.mlp.2", "time_caption_embed.timestep_embedder.linear_2"),
    one_row("cap_embedder.{rest}", f"{_CAPTION}.{{rest}}"),
    one_row("final_layer.adaLN_modulation.1", "norm_out.linear_1"),
    one_row("final_layer.linear", "norm_out.linear_2"),
)

_AURA_JOINT = {
    "attn.w2q": "attn.to_q", "attn.w2k": "attn.to_k", "attn.w2v": "attn.to_v",
    "attn.w2o": "attn.to_out.0", "attn.w1q": "attn.add_q_proj", "attn.w1k": "attn.add_k_proj",
    "attn.w1v": "attn.add_v_proj", "attn.w1o": "attn.to_add_out", "modX.1": "norm1.linear",
    "modC.1": "norm1_context.linear",
}  # fmt: skip
_AURA_SINGLE = {
    "attn.w1q": "attn.to_q", "attn.w1k": "attn.to_k", "attn.w1v": "attn.to_v",
    "attn.w1o": "attn.to_out.0", "modCX.1": "norm1.linear",
}  # fmt: skip
_AURA_MLP = {"c_fc1": "linear_1", "c_fc2": "linear_2", "c_proj": "out_projection"}

AURA = (
    one_row("init_x_linear", "pos_embed.proj"),
    one_row("positional_encoding", "pos_embed.pos_embed"),
    one_row("register_tokens", "register_tokens"),
    one_row("cond_seq_linear", "context_embedder"),
    one_row("t_embedder.mlp.0", "time_step_proj.linear_1"),
    one_row("t_embedder.mlp.2", "time_step_proj.linear_2"),
    *renamed("double_layers.{i}", f"joint_{BLOCK}", _AURA_JOINT),
    *renamed("double_layers.{i}.mlpX", f"joint_{BLOCK}.ff", _AURA_MLP),
    *renamed("double_layers.{i}.mlpC", f"joint_{BLOCK}.ff_context", _AURA_MLP),
    *renamed("single_layers.{i}", SINGLE, _AURA_SINGLE),
    *renamed("single_layers.{i}.mlp", f"{SINGLE}.ff", _AURA_MLP),
    one_row("final_linear", "proj_out"),
    Row("modF.1", ("norm_out.linear",), swapped="always"),
)

_CONDITION = "adaln_single.emb"

PIXART = (
    one_row("x_embedder.proj", "pos_embed.proj"),
    one_row("t_embedder.mlp.0", f"{_CONDITION}.timestep_embedder.linear_1"),
    one_row("t_embedder.mlp.2", f"{_CONDITION}.timestep_embedder.linear_2"),
    one_row("csize_embedder.mlp.0", f"{_CONDITION}.resolution_embedder.linear_1"),
    one_row("csize_embedder.mlp.2", f"{_CONDITION}.resolution_embedder.linear_2"),
    one_row("ar_embedder.mlp.0", f"{_CONDITION}.aspect_ratio_embedder.linear_1"),
    one_row("ar_embedder.mlp.2", f"{_CONDITION}.aspect_ratio_embedder.linear_2"),
    one_row("t_block.1", "adaln_single.linear"),
    one_row("y_embedder.y_proj.fc1", "caption_projection.linear_1"),
    one_row("y_embedder.y_proj.fc2", "caption_projection.linear_2"),
    one_row("blocks.{i}.scale_shift_table", f"{BLOCK}.scale_shift_table"),
    joined("blocks.{i}.attn.qkv", f"{BLOCK}.attn1"),
    one_row("blocks.{i}.attn.proj", f"{BLOCK}.attn1.to_out.0"),
    one_row("blocks.{i}.cross_attn.q_linear", f"{BLOCK}.attn2.to_q"),
    joined("blocks.{i}.cross_attn.kv_linear", f"{BLOCK}.attn2", ("to_k", "to_v")),
    one_row("blocks.{i}.cross_attn.proj", f"{BLOCK}.attn2.to_out.0"),
    one_row("blocks.{i}.mlp.fc1", f"{BLOCK}.ff.net.0.proj"),
    one_row("blocks.{i}.mlp.fc2", f"{BLOCK}.ff.net.2"),
    one_row("final_layer.linear", "proj_out"),
    one_row("final_layer.scale_shift_table", "scale_shift_table"),
)
