//! See `lily_fuzz::templates`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lily_fuzz::templates::check(data));
