//! Which vector instructions the fast kernels use, found at run time.
//!
//! Every kernel gives the same bits on every instruction set: integer sums are exact, and f32 sums follow one
//! order that is part of each kernel's contract. So the choice below changes speed and nothing else.

use std::sync::LazyLock;

/// A set of vector instructions that the kernels have a path for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// What the compiler makes of plain Rust.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// [`Isa::Avx2`] with the byte dot product of AVX-VNNI.
    AvxVnni,
    /// x86-64 with AVX-512 F, BW, VL, DQ and VNNI.
    Avx512Vnni,
    /// [`Isa::Avx512Vnni`] with the byte matrix product of AMX.
    Amx,
    /// aarch64 with the byte dot product.
    NeonDot,
    /// [`Isa::NeonDot`] with the byte matrix product.
    NeonI8mm,
}

impl Isa {
    /// All of them, slowest first.
    pub const ALL: [Isa; 7] =
        [Isa::Portable, Isa::Avx2, Isa::AvxVnni, Isa::Avx512Vnni, Isa::Amx, Isa::NeonDot, Isa::NeonI8mm];

    /// The fastest one that this machine has.
    pub fn detect() -> Isa {
        Isa::available().last().copied().unwrap_or(Isa::Portable)
    }

    /// Those that this machine has, slowest first.
    pub fn available() -> Vec<Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// Whether this machine has it. Cheap: kernels of a few nanoseconds ask.
    pub fn is_available(self) -> bool {
        static AVAILABLE: LazyLock<u8> = LazyLock::new(|| {
            let each = Isa::ALL.into_iter().filter(|isa| isa.is_detected());
            each.map(|isa| 1 << isa as u8).fold(0, |all, one| all | one)
        });
        *AVAILABLE & 1 << self as u8 != 0
    }

    /// Asks the processor.
    fn is_detected(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => Isa::Avx2.is_detected() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => {
                Isa::Avx2.is_detected()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => Isa::Avx512Vnni.is_detected() && crate::kernels::amx::is_usable(),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot => std::arch::is_aarch64_feature_detected!("dotprod"),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm => Isa::NeonDot.is_detected() && std::arch::is_aarch64_feature_detected!("i8mm"),
            _ => false,
        }
    }

    /// The name that [`Isa::parse`] reads.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avx-vnni",
            Isa::Avx512Vnni => "avx512-vnni",
            Isa::Amx => "amx",
            Isa::NeonDot => "neon-dot",
            Isa::NeonI8mm => "neon-i8mm",
        }
    }

    /// The instruction set of that name, whether or not this machine has it.
    pub fn parse(name: &str) -> Option<Isa> {
        Isa::ALL.into_iter().find(|isa| isa.name() == name)
    }
}

/// Whether weights that are read once are better asked for into the second cache than into the first. An Intel core
/// waits for sixteen lines at most on their way into the first cache, and for three times as many into the second.
/// `docs/lab/cpu.md` has both on both.
pub fn asks_second_cache() -> bool {
    static INTEL: LazyLock<bool> = LazyLock::new(is_intel);
    *INTEL
}

#[cfg(target_arch = "x86_64")]
fn is_intel() -> bool {
    // The vendor's name, in this order of registers.
    let name = std::arch::x86_64::__cpuid(0);
    [name.ebx, name.edx, name.ecx].map(u32::to_le_bytes).concat() == b"GenuineIntel"
}

#[cfg(not(target_arch = "x86_64"))]
fn is_intel() -> bool {
    false
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
