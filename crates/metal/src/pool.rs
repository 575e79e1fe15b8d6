//! Memory in equal units with numbers: what kernels find pages and states by.
//!
//! A pool is one buffer. It grows by half where all units are taken, into a larger buffer that what it holds is
//! copied to; units keep their numbers. It never shrinks: what sequences took once is there for the next ones.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use crate::device::{Buffer, Device, Transfer};
use crate::error::DeviceError;

/// Units of `unit` bytes.
#[derive(Debug)]
pub struct Pool<D: Device> {
    label: &'static str,
    unit: usize,
    /// The most units that one buffer can have.
    most: usize,
    buffer: D::Buffer,
    free: Arc<Mutex<BTreeSet<u32>>>,
    capacity: usize,
}

/// A unit that is taken, given back when it is dropped.
#[derive(Debug)]
pub struct Unit {
    number: u32,
    free: Arc<Mutex<BTreeSet<u32>>>,
}

impl Unit {
    /// Its number in the pool.
    pub fn number(&self) -> u32 {
        self.number
    }
}

impl Drop for Unit {
    fn drop(&mut self) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).insert(self.number);
    }
}

impl<D: Device> Pool<D> {
    /// A pool of units of `unit` bytes, `first` of them for now, which together take at most `most` bytes.
    ///
    /// # Errors
    /// No memory for the first.
    pub fn new(
        device: &D,
        label: &'static str,
        unit: usize,
        first: usize,
        most: u64,
    ) -> Result<Pool<D>, DeviceError> {
        let most = usize::try_from(most.min(device.info().max_buffer) / unit as u64).unwrap_or(usize::MAX);
        let most = most.clamp(1, u32::MAX as usize);
        let capacity = first.min(most);
        let buffer = device.allocate(label, capacity * unit)?;
        let free = Arc::new(Mutex::new((0..capacity as u32).collect()));
        Ok(Pool { label, unit, most, buffer, free, capacity })
    }

    /// The buffer that all units are in, until one more has to be taken.
    pub fn buffer(&self) -> &D::Buffer {
        &self.buffer
    }

    /// Bytes of a unit.
    pub fn unit(&self) -> usize {
        self.unit
    }

    /// Where unit `number` begins in the buffer.
    pub fn offset(&self, unit: &Unit) -> usize {
        unit.number as usize * self.unit
    }

    /// Takes the free unit with the lowest number; what it holds is anything. Where the pool has to grow, the
    /// copy that this takes is put behind `transfers`.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], and nothing has changed.
    pub fn take(
        &mut self,
        device: &D,
        transfers: &mut Vec<Transfer<D::Buffer>>,
    ) -> Result<Unit, DeviceError> {
        loop {
            let free = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop_first();
            if let Some(number) = free {
                return Ok(Unit { number, free: Arc::clone(&self.free) });
            }
            self.grow(device, transfers)?;
        }
    }

    fn grow(&mut self, device: &D, transfers: &mut Vec<Transfer<D::Buffer>>) -> Result<(), DeviceError> {
        let capacity = (self.capacity + self.capacity.div_ceil(2)).min(self.most);
        if capacity == self.capacity {
            return Err(DeviceError::OutOfMemory { what: self.label.to_owned(), bytes: self.unit as u64 });
        }
        let larger = device.allocate(self.label, capacity * self.unit)?;
        let from = std::mem::replace(&mut self.buffer, larger.clone());
        let bytes = from.bytes();
        transfers.push(Transfer::Copy { from, from_offset: 0, to: larger, to_offset: 0, bytes });
        let fresh = self.capacity as u32..capacity as u32;
        self.free.lock().unwrap_or_else(PoisonError::into_inner).extend(fresh);
        self.capacity = capacity;
        Ok(())
    }
}
