//! Memory of the emulated GPU.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use lily_model::weights::Blob;

use super::ffi::RawBuffer;
use super::{Emulator, PAGE_BYTES, compile};
use crate::device::Buffer;

/// A buffer. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Memory(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    device: Emulator,
    label: String,
    data: NonNull<u8>,
    bytes: usize,
    /// Mapped bytes, which the memory is; else it is of this buffer.
    mapped: Option<Blob>,
    raw: *mut RawBuffer,
}

// SAFETY: bytes and what is known of them are touched under the device's queue lock only.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Memory {
    /// `None` where there is no memory.
    pub(super) fn new(device: Emulator, label: &str, bytes: usize, mapped: Option<Blob>) -> Option<Memory> {
        let data = match &mapped {
            Some(blob) => NonNull::new(blob.as_ptr().cast_mut())?,
            // SAFETY: the layout has bytes.
            None => NonNull::new(unsafe { alloc_zeroed(layout(bytes)?) })?,
        };
        let runtime = &compile::toolchain().ok()?.runtime;
        let (tracked, read_only) = (device.0.options.tracked.into(), mapped.is_some().into());
        // SAFETY: the memory lives as long as the raw buffer, which this owns.
        let raw = unsafe { (runtime.buffer_new)(data.as_ptr(), bytes, tracked, read_only) };
        device.0.allocated.fetch_add(bytes as u64, Ordering::Relaxed);
        Some(Memory(Arc::new(Inner { device, label: label.into(), data, bytes, mapped, raw })))
    }

    /// What it was allocated for.
    pub fn label(&self) -> &str {
        &self.0.label
    }

    pub(super) fn raw(&self) -> *mut RawBuffer {
        self.0.raw
    }

    pub(super) fn data(&self) -> *mut u8 {
        self.0.data.as_ptr()
    }

    /// Makes bytes known as written. The queue is locked.
    pub(super) fn mark_written(&self, offset: usize, bytes: usize) {
        if let Ok(toolchain) = compile::toolchain() {
            // SAFETY: callers have checked the range.
            unsafe { (toolchain.runtime.buffer_written)(self.0.raw, offset, bytes) }
        }
    }

    /// Copies bytes and what is known of them. The queue is locked, the ranges are inside and do not overlap.
    pub(super) fn copy_to(&self, from: usize, other: &Memory, to: usize, bytes: usize) {
        // SAFETY: as the caller promises.
        unsafe { self.data().add(from).copy_to_nonoverlapping(other.data().add(to), bytes) };
        if let Ok(toolchain) = compile::toolchain() {
            // SAFETY: as above.
            unsafe { (toolchain.runtime.buffer_copied)(other.0.raw, to, self.0.raw, from, bytes) }
        }
    }
}

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.max(1), PAGE_BYTES).ok()
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.device.0.allocated.fetch_sub(self.bytes as u64, Ordering::Relaxed);
        if let Ok(toolchain) = compile::toolchain() {
            // SAFETY: it was made by the same runtime and is not used after this.
            unsafe { (toolchain.runtime.buffer_free)(self.raw) };
        }
        if self.mapped.is_none()
            && let Some(layout) = layout(self.bytes)
        {
            // SAFETY: allocated with this layout.
            unsafe { dealloc(self.data.as_ptr(), layout) };
        }
    }
}

impl PartialEq for Memory {
    fn eq(&self, other: &Memory) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Buffer for Memory {
    fn bytes(&self) -> usize {
        self.0.bytes
    }

    fn read(&self, offset: usize, to: &mut [u8]) {
        assert!(
            offset <= self.0.bytes && to.len() <= self.0.bytes - offset,
            "a read beyond the end of {}",
            self.0.label
        );
        let mut queue = self.0.device.queue();
        queue.host_touches(self, offset..offset + to.len(), false);
        // SAFETY: the range is inside, and nothing runs while the queue is locked.
        unsafe { self.data().add(offset).copy_to_nonoverlapping(to.as_mut_ptr(), to.len()) };
    }

    fn write(&self, offset: usize, from: &[u8]) {
        let inside = offset <= self.0.bytes && from.len() <= self.0.bytes - offset;
        assert!(
            inside && self.0.mapped.is_none(),
            "a write beyond the end of {} or into what is mapped",
            self.0.label
        );
        let mut queue = self.0.device.queue();
        queue.host_touches(self, offset..offset + from.len(), true);
        // SAFETY: the range is inside, and nothing runs while the queue is locked.
        unsafe { self.data().add(offset).copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        self.mark_written(offset, from.len());
    }
}
