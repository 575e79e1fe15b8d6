//! An answer's parts as content blocks: numbered, one open at a time.
//!
//! [`BlockWriter`] turns parts into the events of a stream; [`join`] makes the content of a whole message out
//! of the same events.

use lily_engine::output::Delta as Part;
use serde_json::{Map, Value};

use super::response::{Block, BlockDelta, StreamEvent};

/// Signature of every thinking block. Clients demand one and send it back. It lets a server recognise its own
/// thinking; Lily reads thinking from anybody, and has nothing to check.
pub const SIGNATURE: &str = "lily";

/// Which kind of block is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Text,
    Thinking,
    ToolUse,
}

/// Writes the blocks of one answer.
#[derive(Clone, Debug)]
pub struct BlockWriter {
    /// The answer's id, which its calls are known by.
    turn: String,
    open: Option<Kind>,
    /// Place of the open block, or of the next one.
    index: usize,
    omit_thinking: bool,
}

impl BlockWriter {
    /// `turn`: the answer's id. `omit_thinking` leaves thinking blocks empty.
    pub fn new(turn: &str, omit_thinking: bool) -> BlockWriter {
        BlockWriter { turn: turn.to_string(), open: None, index: 0, omit_thinking }
    }

    /// The events that tell of `parts`.
    pub fn push(&mut self, parts: Vec<Part>) -> Vec<StreamEvent> {
        let mut events = Vec::new();
        for part in parts {
            match part {
                Part::Reasoning(text) => {
                    let block = Block::Thinking { thinking: String::new(), signature: String::new() };
                    self.ensure(Kind::Thinking, block, &mut events);
                    if !self.omit_thinking {
                        events.push(self.delta(BlockDelta::ThinkingDelta { thinking: text }));
                    }
                }
                Part::Content(text) => {
                    self.ensure(Kind::Text, Block::Text { text: String::new() }, &mut events);
                    events.push(self.delta(BlockDelta::TextDelta { text }));
                }
                Part::ToolCall { name } => {
                    self.close(&mut events);
                    let id = format!("toolu_{}_{}", self.turn, self.index);
                    let block = Block::ToolUse { id, name, input: Value::Object(Map::new()) };
                    self.begin(Kind::ToolUse, block, &mut events);
                }
                Part::Arguments(partial_json) => {
                    events.push(self.delta(BlockDelta::InputJsonDelta { partial_json }));
                }
                Part::ToolCallEnd => self.close(&mut events),
            }
        }
        events
    }

    /// The events that end the last block.
    pub fn finish(&mut self) -> Vec<StreamEvent> {
        let mut events = Vec::new();
        self.close(&mut events);
        events
    }

    /// Begins `block` unless one of its kind is open.
    fn ensure(&mut self, kind: Kind, block: Block, events: &mut Vec<StreamEvent>) {
        if self.open != Some(kind) {
            self.begin(kind, block, events);
        }
    }

    fn begin(&mut self, kind: Kind, content_block: Block, events: &mut Vec<StreamEvent>) {
        self.close(events);
        events.push(StreamEvent::ContentBlockStart { index: self.index, content_block });
        self.open = Some(kind);
    }

    fn close(&mut self, events: &mut Vec<StreamEvent>) {
        match self.open.take() {
            None => return,
            Some(Kind::Text | Kind::ToolUse) => {}
            Some(Kind::Thinking) => {
                events.push(self.delta(BlockDelta::SignatureDelta { signature: SIGNATURE.to_string() }));
            }
        }
        events.push(StreamEvent::ContentBlockStop { index: self.index });
        self.index += 1;
    }

    fn delta(&self, delta: BlockDelta) -> StreamEvent {
        StreamEvent::ContentBlockDelta { index: self.index, delta }
    }
}

/// The content that `events` tell of.
pub fn join(events: Vec<StreamEvent>) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut arguments = String::new();
    for event in events {
        match event {
            StreamEvent::ContentBlockStart { content_block, .. } => blocks.push(content_block),
            StreamEvent::ContentBlockDelta { delta, .. } => match (blocks.last_mut(), delta) {
                (Some(Block::Text { text }), BlockDelta::TextDelta { text: more }) => text.push_str(&more),
                (Some(Block::Thinking { thinking, .. }), BlockDelta::ThinkingDelta { thinking: more }) => {
                    thinking.push_str(&more);
                }
                (
                    Some(Block::Thinking { signature, .. }),
                    BlockDelta::SignatureDelta { signature: whole },
                ) => {
                    *signature = whole;
                }
                (Some(Block::ToolUse { .. }), BlockDelta::InputJsonDelta { partial_json }) => {
                    arguments.push_str(&partial_json);
                }
                // The writer opens a block of the kind that it then fills.
                _ => {}
            },
            StreamEvent::ContentBlockStop { .. } => {
                if let Some(Block::ToolUse { input, .. }) = blocks.last_mut() {
                    *input = object(&std::mem::take(&mut arguments));
                }
            }
            StreamEvent::MessageStart { .. }
            | StreamEvent::MessageDelta { .. }
            | StreamEvent::MessageStop
            | StreamEvent::Ping { .. } => {}
        }
    }
    blocks
}

/// The arguments of a call. Of one that was cut off, what is complete: clients of a stream read it so too.
fn object(arguments: &str) -> Value {
    let whole = serde_json::from_str(arguments).ok();
    let value = whole.or_else(|| serde_json::from_str(&completed(arguments)).ok());
    value.unwrap_or_else(|| Value::Object(Map::new()))
}

/// The longest beginning of a JSON text that ends with a complete value, with what is open in it closed.
fn completed(json: &str) -> String {
    let mut open = Vec::new();
    let (mut in_string, mut escaped) = (false, false);
    let mut complete = (0, Vec::new());
    for (at, byte) in json.bytes().enumerate() {
        if in_string {
            in_string = escaped || byte != b'"';
            escaped = byte == b'\\' && !escaped;
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'{' | b'[' => {
                open.push(if byte == b'{' { '}' } else { ']' });
                complete = (at + 1, open.clone());
            }
            b'}' | b']' => {
                open.pop();
                complete = (at + 1, open.clone());
            }
            b',' => complete = (at, open.clone()),
            _ => {}
        }
    }
    let (end, open) = complete;
    json[..end].chars().chain(open.into_iter().rev()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts() -> Vec<Part> {
        let call = || Part::ToolCall { name: "add".to_string() };
        let arguments = |json: &str| Part::Arguments(json.to_string());
        vec![
            Part::Reasoning("Let me ".to_string()),
            Part::Reasoning("see.".to_string()),
            Part::Content("I ".to_string()),
            Part::Content("add.".to_string()),
            call(),
            arguments("{\"a\":"),
            arguments("1}"),
            Part::ToolCallEnd,
            call(),
            arguments("{}"),
            Part::ToolCallEnd,
            Part::Content("Done.".to_string()),
        ]
    }

    #[test]
    fn blocks_are_numbered_and_one_is_open_at_a_time() {
        let mut writer = BlockWriter::new("t", false);
        let mut events = writer.push(parts());
        events.extend(writer.finish());
        let mut open = None;
        let mut blocks = 0;
        for event in &events {
            match event {
                StreamEvent::ContentBlockStart { index, .. } => {
                    assert_eq!((open, *index), (None, blocks));
                    open = Some(*index);
                }
                StreamEvent::ContentBlockDelta { index, .. } => assert_eq!(open, Some(*index)),
                StreamEvent::ContentBlockStop { index } => {
                    assert_eq!(open.take(), Some(*index));
                    blocks += 1;
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!((open, blocks), (None, 5));
    }

    #[test]
    fn nothing_is_lost_however_the_parts_are_cut_into_pushes() {
        let content = |pushes: Vec<Vec<Part>>, omit| {
            let mut writer = BlockWriter::new("t", omit);
            let mut events: Vec<_> = pushes.into_iter().flat_map(|parts| writer.push(parts)).collect();
            events.extend(writer.finish());
            let mut blocks = serde_json::to_value(join(events)).unwrap();
            for block in blocks.as_array_mut().unwrap() {
                block.as_object_mut().unwrap().remove("id");
            }
            blocks
        };
        let whole = content(vec![parts()], false);
        let expected = serde_json::json!([
            {"type": "thinking", "thinking": "Let me see.", "signature": SIGNATURE},
            {"type": "text", "text": "I add."},
            {"type": "tool_use", "name": "add", "input": {"a": 1}},
            {"type": "tool_use", "name": "add", "input": {}},
            {"type": "text", "text": "Done."},
        ]);
        assert_eq!(whole, expected);
        assert_eq!(content(parts().into_iter().map(|part| vec![part]).collect(), false), whole);
        let omitted = content(vec![parts()], true);
        assert_eq!(omitted[0]["thinking"], "");
        assert_eq!(omitted.as_array().unwrap()[1..], whole.as_array().unwrap()[1..]);
    }

    #[test]
    fn a_call_that_was_cut_off_keeps_the_arguments_that_are_complete() {
        let whole = r#"{"text":"a \"b\", c","list":[1,{"x":[true]}],"last":12}"#;
        let all: Value = serde_json::from_str(whole).unwrap();
        for (end, _) in whole.char_indices() {
            let cut = object(&whole[..end]);
            let members = cut.as_object().unwrap();
            for (name, value) in members.iter().filter(|(name, _)| *name != "list") {
                assert_eq!(value, &all[name], "{end}");
            }
        }
        assert_eq!(
            object(r#"{"text":"a","list":[1,{"x":[tr"#),
            serde_json::json!({"text": "a", "list": [1, {"x": []}]})
        );
        assert_eq!(object(r#"{"text":"a","li"#), serde_json::json!({"text": "a"}));
        assert_eq!(object(whole), all);
    }
}
