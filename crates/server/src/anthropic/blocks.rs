//! An answer's parts as content blocks: numbered, one open at a time.
//!
//! [`BlockWriter`] turns parts into the events of a stream; [`join`] makes the content of a whole message out
//! of the same events.

use lily_engine::output::Delta as Part;
use serde_json::{Map, Value};

use super::response::{Block, BlockDelta, StreamEvent};
use crate::openai::assemble::unique_id;

/// Signature of every thinking block. Clients demand one and send it back. It lets a server recognise its own
/// thinking; Lily reads thinking from anybody, and has nothing to check.
pub const SIGNATURE: &str = "lily";

/// Which kind of block is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Text,
    Thinking,
    Call,
}

/// Writes the blocks of one answer.
#[derive(Clone, Debug)]
pub struct BlockWriter {
    open: Option<Kind>,
    /// Place of the open block, or of the next one.
    index: usize,
    omit_thinking: bool,
}

impl BlockWriter {
    /// `omit_thinking` leaves thinking blocks empty.
    pub fn new(omit_thinking: bool) -> BlockWriter {
        BlockWriter { open: None, index: 0, omit_thinking }
    }

    /// The events that tell of `parts`.
    pub fn push(&mut self, parts: Vec<Part>) -> Vec<StreamEvent> {
        let mut events = Vec::new();
        for part in parts {
            match part {
                Part::Reasoning(text) => {
                    self.ensure(Kind::Thinking, &mut events);
                    if !self.omit_thinking {
                        events.push(self.delta(BlockDelta::ThinkingDelta { thinking: text }));
                    }
                }
                Part::Content(text) => {
                    self.ensure(Kind::Text, &mut events);
                    events.push(self.delta(BlockDelta::TextDelta { text }));
                }
                Part::ToolCall { name } => {
                    self.close(&mut events);
                    let input = Value::Object(Map::new());
                    events.push(self.start(Block::ToolUse { id: unique_id("toolu_"), name, input }));
                    self.open = Some(Kind::Call);
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

    fn ensure(&mut self, kind: Kind, events: &mut Vec<StreamEvent>) {
        if self.open == Some(kind) {
            return;
        }
        self.close(events);
        events.push(self.start(match kind {
            Kind::Text | Kind::Call => Block::Text { text: String::new() },
            Kind::Thinking => Block::Thinking { thinking: String::new(), signature: String::new() },
        }));
        self.open = Some(kind);
    }

    fn close(&mut self, events: &mut Vec<StreamEvent>) {
        match self.open.take() {
            None => return,
            Some(Kind::Text | Kind::Call) => {}
            Some(Kind::Thinking) => {
                events.push(self.delta(BlockDelta::SignatureDelta { signature: SIGNATURE.to_string() }));
            }
        }
        events.push(self.stop());
    }

    fn start(&self, content_block: Block) -> StreamEvent {
        StreamEvent::ContentBlockStart { index: self.index, content_block }
    }

    fn delta(&self, delta: BlockDelta) -> StreamEvent {
        StreamEvent::ContentBlockDelta { index: self.index, delta }
    }

    fn stop(&mut self) -> StreamEvent {
        let index = self.index;
        self.index += 1;
        StreamEvent::ContentBlockStop { index }
    }
}

/// The content that `events` tell of. A call that was cut off is text: what there is of its arguments.
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
                    let text = std::mem::take(&mut arguments);
                    match serde_json::from_str(&text) {
                        Ok(arguments) => *input = arguments,
                        // The answer was cut off in the call, and half of one must not look like a call.
                        Err(_) => {
                            blocks.pop();
                            blocks.push(Block::Text { text });
                        }
                    }
                }
            }
            StreamEvent::MessageStart { .. }
            | StreamEvent::MessageDelta { .. }
            | StreamEvent::MessageStop => {}
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts() -> Vec<Part> {
        let call = |arguments: &str| {
            [
                Part::ToolCall { name: "add".to_string() },
                Part::Arguments(arguments.to_string()),
                Part::ToolCallEnd,
            ]
        };
        let mut parts = vec![
            Part::Reasoning("Let me ".to_string()),
            Part::Reasoning("see.".to_string()),
            Part::Content("I ".to_string()),
            Part::Content("add.".to_string()),
        ];
        parts.extend(call("{\"a\":1}"));
        parts.extend(call("{}"));
        parts.push(Part::Content("Done.".to_string()));
        parts
    }

    #[test]
    fn blocks_are_numbered_and_one_is_open_at_a_time() {
        let mut writer = BlockWriter::new(false);
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
            let mut writer = BlockWriter::new(omit);
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
}
