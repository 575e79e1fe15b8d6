//! See `lily_fuzz::bodies`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lily_fuzz::bodies::check(data));
