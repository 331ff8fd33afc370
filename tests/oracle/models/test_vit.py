"""The vision transformer against the same in torch, with timm's names."""

import datasets
from curves import Curve, adamw, classifies, torch_classifies
from models.vit import VisionTransformer

SIZES = {"size": 8, "patch": 4, "channels": 1, "dim": 24, "depth": 2, "heads": 3, "ratio": 2}


def torch_vit(torch):
    nn, f, dim = torch.nn, torch.nn.functional, SIZES["dim"]

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

        def forward(self, x):
            b, n, _ = x.shape
            q, k, v = self.qkv(x).reshape(b, n, 3, 3, dim // 3).permute(2, 0, 3, 1, 4).unbind(0)
            return self.proj(
                f.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, dim)
            )

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
            self.attn, self.mlp = Attention(), nn.Module()
            self.mlp.fc1, self.mlp.fc2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

        def forward(self, x):
            x = x + self.attn(self.norm1(x))
            return x + self.mlp.fc2(f.gelu(self.mlp.fc1(self.norm2(x))))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
            self.pos_embed = nn.Parameter(torch.zeros(1, 5, dim))
            self.patch_embed = nn.Module()
            self.patch_embed.proj = nn.Conv2d(1, dim, 4, stride=4)
            self.blocks = nn.Sequential(Block(), Block())
            self.norm = nn.LayerNorm(dim, eps=1e-6)
            self.head = nn.Linear(dim, 10)

        def forward(self, x):
            h = self.patch_embed.proj(x).flatten(2).transpose(1, 2)
            h = torch.cat([self.cls_token.expand(len(x), -1, -1), h], dim=1) + self.pos_embed
            return self.head(self.norm(self.blocks(h))[:, 0])

    return Net()


CURVES = [
    Curve(
        "vit",
        lambda: VisionTransformer(10, **SIZES),
        torch_vit,
        classifies,
        torch_classifies,
        lambda step: datasets.digits(8, size=8, seed=step % 4),
        adamw(3e-3),
        ("float32", "bfloat16"),
    )
]


def test_it_learns_as_in_torch(learns_as_torch, curve, precision):
    learns_as_torch(curve, precision)
