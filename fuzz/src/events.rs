//! Server-sent events, as a client reads them.

use serde_json::Value;

/// One event.
#[derive(Debug)]
pub struct Event {
    /// Its name, where it has one.
    pub name: Option<String>,
    /// Its data.
    pub data: String,
}

impl Event {
    /// The data, which must be JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.data).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }
}

/// The events of a stream (WHATWG HTML, "Interpreting an event stream"; Lily sends `event` and `data` alone, and
/// comments). Each must be complete.
pub fn events(body: &[u8]) -> Vec<Event> {
    let text = std::str::from_utf8(body).expect("a stream is UTF-8");
    let mut events = Vec::new();
    let (mut name, mut data) = (None, Vec::new());
    // A reader ends lines at a carriage return too, so that one may not stand in the data as it is.
    for line in text.split(['\n', '\r']) {
        match line.split_once(':') {
            _ if line.is_empty() => {
                if !data.is_empty() {
                    let data = std::mem::take(&mut data).join("\n");
                    events.push(Event { name: name.take(), data });
                }
            }
            Some(("", _)) => {}
            Some(("event", value)) => name = Some(value.trim_start().to_string()),
            Some(("data", value)) => data.push(value.strip_prefix(' ').unwrap_or(value)),
            _ => panic!("{line:?} is no line of an event stream"),
        }
    }
    assert!(name.is_none() && data.is_empty(), "the last event is not complete");
    events
}
