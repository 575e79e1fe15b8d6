//! What a Mac's GPU is and can do.

use objc2::runtime::ProtocolObject;
use objc2_core_foundation::{CFNumber, CFString};
use objc2_io_kit::{
    IOObjectRelease, IORegistryEntryCreateCFProperty, IOServiceGetMatchingService, IOServiceMatching,
    kIOMainPortDefault,
};
use objc2_metal::{MTLDevice, MTLGPUFamily};

use crate::device::DeviceInfo;

/// The newest family first, with Apple's numbers.
const FAMILIES: [(MTLGPUFamily, u32); 4] = [
    (MTLGPUFamily::Apple10, 10),
    (MTLGPUFamily::Apple9, 9),
    (MTLGPUFamily::Apple8, 8),
    (MTLGPUFamily::Apple7, 7),
];
/// Cores of the smallest GPU that Lily runs on: where the system does not tell.
const FEWEST_CORES: u32 = 7;
/// Threads of a SIMD-group on every Apple GPU.
const SIMD_WIDTH: u32 = 32;
/// Bytes of a page on every Mac with an Apple GPU.
const PAGE_BYTES: usize = 16 << 10;

/// Whether it is an Apple GPU from the M1 on, which is what the kernels are written for.
pub fn is_usable(device: &ProtocolObject<dyn MTLDevice>) -> bool {
    device.supportsFamily(MTLGPUFamily::Apple7) && device.hasUnifiedMemory()
}

/// All that Lily asks about it.
pub fn info(device: &ProtocolObject<dyn MTLDevice>) -> DeviceInfo {
    let family = FAMILIES.iter().find(|(family, _)| device.supportsFamily(*family));
    DeviceInfo {
        name: device.name().to_string(),
        family: family.map_or(0, |&(_, number)| number),
        has_metal4: device.supportsFamily(MTLGPUFamily::Metal4),
        cores: cores().unwrap_or(FEWEST_CORES),
        memory: memory(),
        working_set: device.recommendedMaxWorkingSetSize(),
        max_buffer: device.maxBufferLength() as u64,
        has_unified_memory: device.hasUnifiedMemory(),
        threadgroup_memory: u32::try_from(device.maxThreadgroupMemoryLength()).unwrap_or(u32::MAX),
        simd_width: SIMD_WIDTH,
        page_bytes: PAGE_BYTES,
    }
}

/// Bytes of the machine's memory.
fn memory() -> u64 {
    objc2_foundation::NSProcessInfo::processInfo().physicalMemory()
}

/// The GPU's cores: Metal does not tell, the registry of devices does.
fn cores() -> Option<u32> {
    // SAFETY: the name is a string that ends with a zero.
    let matching = unsafe { IOServiceMatching(c"AGXAccelerator".as_ptr()) }?;
    // SAFETY: the constant is the system's own; the dictionary is of the kind that the function wants, which takes it over.
    let service =
        unsafe { IOServiceGetMatchingService(kIOMainPortDefault, Some(matching.as_opaque().into())) };
    if service == 0 {
        return None;
    }
    let key = CFString::from_static_str("gpu-core-count");
    // SAFETY: the entry was just found; no allocator stands for the usual one.
    let value = unsafe { IORegistryEntryCreateCFProperty(service, Some(&key), None, 0) };
    IOObjectRelease(service);
    let count = value?.downcast::<CFNumber>().ok()?.as_i64()?;
    u32::try_from(count).ok().filter(|&count| count > 0)
}
