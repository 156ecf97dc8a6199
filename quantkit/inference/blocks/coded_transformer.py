"""Transformer2DModel of packed models, with its group norm and quantization fused."""

from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor, channels_last

from quantkit.inference.blocks.picture_norms import is_coded, norm_codes, pixels


class CodedTransformer2DModel(Transformer2DModel):  # type: ignore[misc]  # diffusers' own class is untyped
    """A Transformer2DModel whose first layer is packed; parameters and submodules are the same."""

    def _operate_on_continuous_inputs(self, hidden_states: Tensor) -> tuple[Tensor, int]:
        pair = ((self.norm, self.proj_in),)
        if self.training or not is_coded(hidden_states, pair, ()):
            found: tuple[Tensor, int] = super()._operate_on_continuous_inputs(hidden_states)
            return found
        x = pixels(hidden_states.contiguous(memory_format=channels_last))
        rows = x.flatten(1, 2)
        codes = norm_codes(rows, None, self.norm, self.proj_in, "")
        y = self.proj_in.multiply_codes(codes.flatten(0, 1), x.dtype)
        return y.reshape(*rows.shape[:2], self.proj_in.n), x.shape[3]

    def _get_output_for_continuous_inputs(
        self, hidden_states: Tensor, residual: Tensor, **sizes: int
    ) -> Tensor:
        last = residual.is_contiguous(memory_format=channels_last)
        if self.training or not self.use_linear_projection or not last:
            y: Tensor = super()._get_output_for_continuous_inputs(hidden_states, residual, **sizes)
            return y
        shape = [sizes[name] for name in ("batch_size", "height", "width", "inner_dim")]
        projected: Tensor = self.proj_out(hidden_states)
        return projected.reshape(shape).permute(0, 3, 1, 2) + residual
