"""Names of UNets of Stable Diffusion."""

from quantkit.interchange.layout_rows import one_row, renamed

_RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}

UNET = (
    one_row("time_embed.0", "time_embedding.linear_1"),
    one_row("time_embed.2", "time_embedding.linear_2"),
    one_row("label_emb.0.0", "add_embedding.linear_1"),
    one_row("label_emb.0.2", "add_embedding.linear_2"),
    one_row("input_blocks.0.0", "conv_in"),
    *renamed("input_blocks.{input}.0", "down_blocks.{x}.resnets.{i}", _RESNET),
    one_row("input_blocks.{input}.1.{rest}", "down_blocks.{x}.attentions.{i}.{rest}"),
    one_row("input_blocks.{downsampler}.0.op", "down_blocks.{x}.downsamplers.0.conv"),
    *renamed("middle_block.0", "mid_block.resnets.0", _RESNET),
    one_row("middle_block.1.{rest}", "mid_block.attentions.0.{rest}"),
    *renamed("middle_block.2", "mid_block.resnets.1", _RESNET),
    *renamed("output_blocks.{output}.0", "up_blocks.{x}.resnets.{i}", _RESNET),
    one_row("output_blocks.{output}.1.{rest}", "up_blocks.{x}.attentions.{i}.{rest}"),
    one_row("output_blocks.{upsampler}.{after}.conv", "up_blocks.{x}.upsamplers.0.conv"),
    one_row("out.0", "conv_norm_out"),
    one_row("out.2", "conv_out"),
)
