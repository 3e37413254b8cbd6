"""A small byte-level GPT and the English text it learns.

Shapes: B batch, T time, D model width, H heads, K head width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # bytes


class Attention(nn.Module):
    """Causal attention with rotary positions and one sigmoid gate per head (arXiv 2505.06708)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, heads, bias=False)  # (heads, width): few rows, many ranks
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        q_BHTK, k_BHTK, v_BHTK = (
            project(x_BTD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        q_BHTK, k_BHTK = rotate(q_BHTK, rotary), rotate(k_BHTK, rotary)
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        gate_BHT1 = 2 * torch.sigmoid(self.gate(x_BTD)).transpose(1, 2).unsqueeze(-1)
        return self.out((gate_BHT1 * y_BHTK).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention, then an MLP with squared ReLU; each reads a normalized input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotary)
        return x_BTD + self.down(F.relu(self.up(self.mlp_norm(x_BTD))).square())


class TinyGPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, width: int = 288, heads: int = 18, layers: int = 3) -> None:
        super().__init__()
        self.head_width = width // heads
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.initialize()

    def initialize(self) -> None:
        """Start every block as the identity and every prediction as uniform."""
        nn.init.normal_(self.embedding.weight, std=0.5)
        nn.init.zeros_(self.head.weight)
        for block in self.blocks:
            nn.init.zeros_(block.attention.out.weight)
            nn.init.zeros_(block.down.weight)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        rotary = rotary_angles(tokens_BT.shape[-1], self.head_width, x_BTD)
        for block in self.blocks:
            x_BTD = block(x_BTD, rotary)
        return self.head(self.norm(x_BTD)).float()


def rotary_angles(time: int, head_width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [time, head_width / 2], of arXiv 2104.09864."""
    frequency = 10_000.0 ** -torch.linspace(0, 1, head_width // 2, device=like.device)
    angle = torch.outer(torch.arange(time, device=like.device), frequency)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x_BHTK: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of channels by its position's angle."""
    cos, sin = rotary
    a, b = x_BHTK.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
