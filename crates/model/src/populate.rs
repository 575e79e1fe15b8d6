//! Bringing mapped bytes into the process's page tables before anyone waits for them.
//!
//! A mapped file is entered into the page tables where it is first read, a page fault each time. One token of
//! the full model reads some thousand separate pieces of experts, other ones than the token before, so that
//! faults go on for hundreds of tokens: two threads read experts at 27 to 35 GB/s meanwhile and at 52 to 55
//! afterwards (`docs/lab/cpu.md`).

/// Bytes between two pages, at the most finely paged systems.
const PAGE: usize = 4096;

/// Enters all pages that hold `bytes`, reading from the file what is not in memory yet. Where it does not
/// succeed nothing is lost but time.
pub fn populate(bytes: &[u8]) {
    if bytes.is_empty() || enter(bytes) {
        return;
    }
    for page in bytes.chunks(PAGE) {
        std::hint::black_box(page[0]);
    }
}

/// In one call, where the system has one (Linux 5.14); whether it did.
#[cfg(target_os = "linux")]
fn enter(bytes: &[u8]) -> bool {
    let start = bytes.as_ptr().addr() & !(PAGE - 1);
    let end = bytes.as_ptr().addr() + bytes.len();
    // SAFETY: the range is that of a live slice, widened to whole pages, and the call only reads.
    unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_POPULATE_READ) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn enter(_: &[u8]) -> bool {
    false
}
