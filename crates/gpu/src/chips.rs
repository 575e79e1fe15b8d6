//! Devices that passes are reckoned for, by what is published or measured of them, and the assumptions that make an
//! estimate of it. Sources stand in `docs/performance.md`, with the check against published speeds.

/// A device, by its two rates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chip {
    /// Its name.
    pub name: &'static str,
    /// Bytes that its memory moves in a second.
    pub bytes_per_second: f64,
    /// Operations in a second, of the kind that its kernels use; a multiplication and an addition are two.
    pub operations_per_second: f64,
}

/// f32 operations in a second of so many Apple GPU cores, which have 128 lanes each, at so many GHz.
const fn lanes(cores: f64, gigahertz: f64) -> f64 {
    const OPERATIONS: f64 = 2.0 * 128.0;
    cores * OPERATIONS * gigahertz * 1e9
}

/// Apple's, with the most GPU cores that each is sold with: published bandwidths, and the rate of the f32 units. The neural
/// accelerators of an M5 are left out: no kernel asks for them.
pub const APPLE: [Chip; 5] = [
    Chip { name: "M1 Max", bytes_per_second: 400e9, operations_per_second: lanes(32.0, 1.296) },
    Chip { name: "M2 Ultra", bytes_per_second: 800e9, operations_per_second: lanes(76.0, 1.398) },
    Chip { name: "M3 Max", bytes_per_second: 400e9, operations_per_second: lanes(40.0, 1.398) },
    Chip { name: "M4 Max", bytes_per_second: 546e9, operations_per_second: lanes(40.0, 1.578) },
    Chip { name: "M5 Max", bytes_per_second: 614e9, operations_per_second: lanes(40.0, 1.74) },
];

/// An H200 as measured: a plain read, and the largest product of bf16 matrices.
pub const H200: Chip = Chip { name: "H200", bytes_per_second: 4.6e12, operations_per_second: 786e12 };

/// The part of a chip's bandwidth that kernels are assumed to reach.
pub const MEMORY_REACHED: f64 = 0.85;
/// The part of its arithmetic rate that they are assumed to reach: of an M5 Max's neural accelerators the reference engine's
/// published prefill has 0.44, MLX-LM's 0.36.
pub const ARITHMETIC_REACHED: f64 = 0.4;
/// Seconds that each kernel of the longest dependent chain is assumed to add: what the reference engine's published decode
/// leaves for each of its 555 dependent stages on an M5 Max.
pub const SHORTEST_STAGE: f64 = 3.2e-6;
/// The same where stages take longest: what a published decode with MLX leaves for each on an M2 Max, if it has as many as
/// MLX-LM's seems to have on an M5 Max.
pub const LONGEST_STAGE: f64 = 6.6e-6;
