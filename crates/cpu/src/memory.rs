//! Allocating without dying.

use lily_engine::backend::BackendError;

/// `elements` default values, or an error that names `what` they were for.
pub fn zeroed<T: Clone + Default>(what: &'static str, elements: usize) -> Result<Vec<T>, BackendError> {
    let mut values = Vec::new();
    grow(what, &mut values, elements)?;
    Ok(values)
}

/// Lengthens `values` to at least `elements`; what it holds stays.
pub fn grow<T: Clone + Default>(
    what: &'static str,
    values: &mut Vec<T>,
    elements: usize,
) -> Result<(), BackendError> {
    if elements > values.len() {
        values.try_reserve_exact(elements - values.len()).map_err(|_| BackendError::OutOfMemory {
            what,
            bytes: elements.saturating_mul(size_of::<T>()),
        })?;
        values.resize(elements, T::default());
    }
    Ok(())
}
