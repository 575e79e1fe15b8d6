//! An answer's parts as output items: numbered, one open at a time.
//!
//! [`ItemWriter`] keeps the items and tells of them in the events of a stream; a whole response is made of the same
//! items.

use lily_engine::output::Delta;
use serde_json::Value;

use super::events::StreamEvent;
use super::reasoning;
use super::response::{Item, Part, Response};
use super::tools::Offered;
use crate::openai::response::TokenLogProb;

/// Status of an item that is open.
const OPEN: &str = "in_progress";

/// What of the reasoning a request wants to see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    /// As a summary.
    pub summary: bool,
    /// As `encrypted_content` too.
    pub sealed: bool,
}

/// Writes the items of one answer.
#[derive(Debug)]
pub struct ItemWriter {
    /// What the ids of all items have in common.
    turn: String,
    offered: Offered,
    wish: Wish,
    items: Vec<Item>,
    /// Text of the item that is open; arguments, where that is a call.
    text: String,
    logprobs: Vec<TokenLogProb>,
    open: bool,
}

impl ItemWriter {
    /// `turn`: the answer's id, which its calls are known by.
    pub fn new(turn: String, offered: Offered, wish: Wish) -> ItemWriter {
        let (items, logprobs) = (Vec::new(), Vec::new());
        ItemWriter { turn, offered, wish, items, text: String::new(), logprobs, open: false }
    }

    /// The events that tell of `deltas`. `scored` are the tokens behind them.
    pub fn push(&mut self, deltas: Vec<Delta>, scored: Vec<TokenLogProb>) -> Vec<StreamEvent> {
        let mut events = Vec::new();
        let mut scored = Some(scored);
        for delta in deltas {
            match delta {
                Delta::Reasoning(text) => {
                    if !matches!(self.last(), Some(Item::Reasoning { .. })) {
                        self.begin_reasoning(&mut events);
                    }
                    self.text.push_str(&text);
                    events.push(self.reasoning_delta(text));
                }
                Delta::Content(text) => {
                    if !matches!(self.last(), Some(Item::Message { .. })) {
                        self.begin_message(&mut events);
                    }
                    self.text.push_str(&text);
                    let logprobs = scored.take().unwrap_or_default();
                    self.logprobs.extend_from_slice(&logprobs);
                    let (item_id, output_index) = self.place();
                    let content_index = 0;
                    events.push(StreamEvent::TextDelta {
                        item_id,
                        output_index,
                        content_index,
                        delta: text,
                        logprobs,
                    });
                }
                Delta::ToolCall { name } => self.begin_call(name, &mut events),
                Delta::Arguments(json) => {
                    self.text.push_str(&json);
                    // A custom tool's input is not these arguments, but the one text in them.
                    if matches!(self.last(), Some(Item::FunctionCall { .. })) {
                        let (item_id, output_index) = self.place();
                        events.push(StreamEvent::ArgumentsDelta { item_id, output_index, delta: json });
                    }
                }
                Delta::ToolCallEnd => self.end("completed", &mut events),
            }
        }
        events
    }

    /// The events that end the last item, with its `status`.
    pub fn finish(&mut self, status: &'static str) -> Vec<StreamEvent> {
        let mut events = Vec::new();
        self.end(status, &mut events);
        events
    }

    /// The sign of life of `response`: an event of which nobody gains anything. Clients that give up on a stream without
    /// events, as Codex does, count no comments, and no event that means only this is known to all clients: some of
    /// them end at OpenAI's own `keepalive`.
    ///
    /// While an item is open, it becomes longer by nothing. Else the response is in progress with the items that it has,
    /// since clients take over what they are told of it: OpenAI's for JavaScript forgets items that are not in it.
    pub fn unchanged(&self, response: &Response) -> StreamEvent {
        let delta = String::new();
        let (item_id, output_index) = self.place();
        match self.last() {
            Some(Item::Reasoning { .. }) => self.reasoning_delta(delta),
            Some(Item::Message { .. }) => {
                let (content_index, logprobs) = (0, Vec::new());
                StreamEvent::TextDelta { item_id, output_index, content_index, delta, logprobs }
            }
            Some(Item::FunctionCall { .. }) => StreamEvent::ArgumentsDelta { item_id, output_index, delta },
            Some(Item::CustomToolCall { .. }) => StreamEvent::InputDelta { item_id, output_index, delta },
            None => {
                let output = self.items.clone();
                StreamEvent::InProgress { response: Response { output, ..response.clone() } }
            }
        }
    }

    /// The items so far.
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    /// The item that is open.
    fn last(&self) -> Option<&Item> {
        self.items.last().filter(|_| self.open)
    }

    fn id(&self, prefix: &str) -> String {
        format!("{prefix}_{}_{}", self.turn, self.items.len())
    }

    /// Id and place of the last item.
    fn place(&self) -> (String, usize) {
        let id = match self.items.last() {
            Some(
                Item::Reasoning { id, .. }
                | Item::Message { id, .. }
                | Item::FunctionCall { id, .. }
                | Item::CustomToolCall { id, .. },
            ) => id.clone(),
            None => String::new(),
        };
        (id, self.items.len().saturating_sub(1))
    }

    fn begin(&mut self, item: Item, events: &mut Vec<StreamEvent>) {
        self.end("completed", events);
        self.items.push(item.clone());
        self.open = true;
        events.push(StreamEvent::ItemAdded { output_index: self.items.len() - 1, item });
    }

    fn begin_reasoning(&mut self, events: &mut Vec<StreamEvent>) {
        let content = (!self.wish.summary).then(Vec::new);
        let (id, summary) = (self.id("rs"), Vec::new());
        self.begin(Item::Reasoning { id, summary, content, encrypted_content: None, status: OPEN }, events);
        let (item_id, output_index) = self.place();
        let (part, content_index, summary_index) = (self.reasoning_part(String::new()), 0, 0);
        events.push(if self.wish.summary {
            StreamEvent::SummaryAdded { item_id, output_index, summary_index, part }
        } else {
            StreamEvent::PartAdded { item_id, output_index, content_index, part }
        });
    }

    fn reasoning_part(&self, text: String) -> Part {
        if self.wish.summary { Part::SummaryText { text } } else { Part::ReasoningText { text } }
    }

    fn reasoning_delta(&self, delta: String) -> StreamEvent {
        let (item_id, output_index) = self.place();
        if self.wish.summary {
            StreamEvent::SummaryDelta { item_id, output_index, summary_index: 0, delta }
        } else {
            StreamEvent::ReasoningDelta { item_id, output_index, content_index: 0, delta }
        }
    }

    fn begin_message(&mut self, events: &mut Vec<StreamEvent>) {
        let id = self.id("msg");
        self.begin(Item::Message { id, role: "assistant", status: OPEN, content: Vec::new() }, events);
        let (item_id, output_index) = self.place();
        let part = Part::OutputText { text: String::new(), annotations: [], logprobs: Vec::new() };
        events.push(StreamEvent::PartAdded { item_id, output_index, content_index: 0, part });
    }

    fn begin_call(&mut self, known_as: String, events: &mut Vec<StreamEvent>) {
        // The item before is complete, and so are the ids made of its number.
        self.end("completed", events);
        let call_id = self.id("call");
        let tool = self.offered.called(&known_as).cloned();
        let (custom, namespace) = tool.as_ref().map_or((false, None), |t| (t.custom, t.namespace.clone()));
        let name = tool.map_or(known_as, |tool| tool.name);
        let item = if custom {
            let (id, input) = (self.id("ctc"), String::new());
            Item::CustomToolCall { id, call_id, name, namespace, input, status: OPEN }
        } else {
            let (id, arguments) = (self.id("fc"), String::new());
            Item::FunctionCall { id, call_id, name, namespace, arguments, status: OPEN }
        };
        self.begin(item, events);
    }

    /// Completes the open item.
    fn end(&mut self, ended: &'static str, events: &mut Vec<StreamEvent>) {
        if !std::mem::take(&mut self.open) {
            return;
        }
        let text = std::mem::take(&mut self.text);
        let scored = std::mem::take(&mut self.logprobs);
        let (item_id, output_index) = self.place();
        let part = self.reasoning_part(text.clone());
        let wish = self.wish;
        let Some(item) = self.items.last_mut() else { return };
        let (content_index, summary_index) = (0, 0);
        match item {
            Item::Reasoning { summary, content, encrypted_content, status, .. } => {
                *status = ended;
                *encrypted_content = wish.sealed.then(|| reasoning::sealed(&text));
                if wish.summary {
                    summary.push(part.clone());
                    let id = item_id.clone();
                    events.push(StreamEvent::SummaryDone { item_id: id, output_index, summary_index, text });
                    events.push(StreamEvent::SummaryPartDone { item_id, output_index, summary_index, part });
                } else {
                    content.get_or_insert_default().push(part.clone());
                    let id = item_id.clone();
                    events.push(StreamEvent::ReasoningDone {
                        item_id: id,
                        output_index,
                        content_index,
                        text,
                    });
                    events.push(StreamEvent::PartDone { item_id, output_index, content_index, part });
                }
            }
            Item::Message { content, status, .. } => {
                *status = ended;
                let part = Part::OutputText { text: text.clone(), annotations: [], logprobs: scored.clone() };
                content.push(part.clone());
                events.push(StreamEvent::TextDone {
                    item_id: item_id.clone(),
                    output_index,
                    content_index,
                    text,
                    logprobs: scored,
                });
                events.push(StreamEvent::PartDone { item_id, output_index, content_index, part });
            }
            Item::FunctionCall { name, arguments, status, .. } => {
                *status = ended;
                arguments.clone_from(&text);
                let name = name.clone();
                events.push(StreamEvent::ArgumentsDone { item_id, output_index, name, arguments: text });
            }
            Item::CustomToolCall { input, status, .. } => {
                *status = ended;
                *input = input_of(&text);
                let (id, delta, input) = (item_id.clone(), input.clone(), input.clone());
                events.push(StreamEvent::InputDelta { item_id: id, output_index, delta });
                events.push(StreamEvent::InputDone { item_id, output_index, input });
            }
        }
        events.push(StreamEvent::ItemDone { output_index, item: item.clone() });
    }
}

/// The input of a custom tool: the one text among its arguments, as far as it goes.
fn input_of(arguments: &str) -> String {
    let whole = [arguments.to_string(), format!("{arguments}\"}}")];
    let object = whole.iter().find_map(|text| serde_json::from_str::<Value>(text).ok());
    let input = object.as_ref().and_then(|object| object["input"].as_str());
    input.unwrap_or_default().to_string()
}

#[cfg(test)]
mod tests {
    use lily_engine::sampler::SamplingParams;
    use serde_json::{Map, json};

    use super::*;
    use crate::openai::fields::Fields;

    fn offered() -> Offered {
        let body = json!({"tools": [
            {"type": "function", "name": "add"},
            {"type": "custom", "name": "patch"},
            {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [
                {"type": "function", "name": "close", "description": "Close one."}]}]});
        Offered::read(&Fields::body(&body).unwrap(), None).unwrap()
    }

    fn parts() -> Vec<Delta> {
        let call = |name: &str| Delta::ToolCall { name: name.to_string() };
        let arguments = |json: &str| Delta::Arguments(json.to_string());
        vec![
            Delta::Reasoning("Let me ".to_string()),
            Delta::Reasoning("see.".to_string()),
            Delta::Content("I ".to_string()),
            Delta::Content("add.".to_string()),
            call("add"),
            arguments("{\"a\":"),
            arguments("1}"),
            Delta::ToolCallEnd,
            call("patch"),
            arguments("{\"input\":\"a \\\"b"),
            arguments("\\\"\\n\"}"),
            Delta::ToolCallEnd,
            call("agents.close"),
            arguments("{}"),
            Delta::ToolCallEnd,
        ]
    }

    fn written(pushes: Vec<Vec<Delta>>, wish: Wish) -> (Vec<StreamEvent>, Value) {
        let mut writer = ItemWriter::new("t".to_string(), offered(), wish);
        let mut events: Vec<_> =
            pushes.into_iter().flat_map(|deltas| writer.push(deltas, Vec::new())).collect();
        events.extend(writer.finish("completed"));
        (events, serde_json::to_value(writer.items()).unwrap())
    }

    #[test]
    fn an_answer_becomes_items_however_it_is_cut() {
        let (_, whole) = written(vec![parts()], Wish::default());
        let expected = json!([
            {"type": "reasoning", "id": "rs_t_0", "summary": [], "status": "completed",
                "content": [{"type": "reasoning_text", "text": "Let me see."}]},
            {"type": "message", "id": "msg_t_1", "role": "assistant", "status": "completed",
                "content": [{"type": "output_text", "text": "I add.", "annotations": [], "logprobs": []}]},
            {"type": "function_call", "id": "fc_t_2", "call_id": "call_t_2", "name": "add",
                "arguments": "{\"a\":1}", "status": "completed"},
            {"type": "custom_tool_call", "id": "ctc_t_3", "call_id": "call_t_3", "name": "patch",
                "input": "a \"b\"\n", "status": "completed"},
            {"type": "function_call", "id": "fc_t_4", "call_id": "call_t_4", "name": "close",
                "namespace": "agents", "arguments": "{}", "status": "completed"},
        ]);
        assert_eq!(whole, expected);
        let single = parts().into_iter().map(|part| vec![part]).collect();
        assert_eq!(written(single, Wish::default()).1, whole);
        let (_, summed) = written(vec![parts()], Wish { summary: true, sealed: true });
        let reasoning = json!({"type": "reasoning", "id": "rs_t_0", "status": "completed",
            "summary": [{"type": "summary_text", "text": "Let me see."}], "encrypted_content": "lily:Let me see."});
        assert_eq!(summed[0], reasoning);
    }

    #[test]
    fn events_tell_of_one_item_after_the_other() {
        for wish in [Wish::default(), Wish { summary: true, sealed: false }] {
            let (events, items) = written(vec![parts()], wish);
            let mut open = None;
            let mut done = Vec::new();
            for event in events {
                let event = serde_json::to_value(event).unwrap();
                let place = event["output_index"].as_u64();
                match event["type"].as_str().unwrap() {
                    "response.output_item.added" => {
                        assert_eq!((open, place), (None, Some(done.len() as u64)), "{event}");
                        open = place;
                    }
                    "response.output_item.done" => {
                        assert_eq!(open.take(), place, "{event}");
                        done.push(event["item"].clone());
                    }
                    _ => assert_eq!(open, place, "{event}"),
                }
            }
            assert_eq!(Value::Array(done), items);
        }
    }

    /// What a client makes of `events` that adds up deltas, and takes over every response that it is told.
    fn added_up(events: Vec<StreamEvent>) -> Value {
        let mut output = json!([]);
        for event in events {
            let event = serde_json::to_value(event).unwrap();
            let append = |text: &mut Value| {
                *text = format!("{}{}", text.as_str().unwrap(), event["delta"].as_str().unwrap()).into();
            };
            let item = event["output_index"].as_u64().map(|place| place as usize);
            let add = |list: &mut Value, new: &Value| list.as_array_mut().unwrap().push(new.clone());
            match (event["type"].as_str().unwrap(), item) {
                ("response.in_progress", _) => output = event["response"]["output"].clone(),
                ("response.output_item.added", _) => add(&mut output, &event["item"]),
                ("response.content_part.added", Some(item)) => {
                    add(&mut output[item]["content"], &event["part"])
                }
                ("response.reasoning_summary_part.added", Some(item)) => {
                    add(&mut output[item]["summary"], &event["part"])
                }
                ("response.output_text.delta" | "response.reasoning_text.delta", Some(item)) => {
                    append(&mut output[item]["content"][0]["text"])
                }
                ("response.reasoning_summary_text.delta", Some(item)) => {
                    append(&mut output[item]["summary"][0]["text"])
                }
                ("response.function_call_arguments.delta", Some(item)) => {
                    append(&mut output[item]["arguments"])
                }
                ("response.custom_tool_call_input.delta", Some(item)) => append(&mut output[item]["input"]),
                ("response.output_item.done", Some(item)) => output[item]["status"] = json!("completed"),
                _ => {}
            }
        }
        output
    }

    #[test]
    fn signs_of_life_take_nothing_from_a_client_and_give_it_nothing() {
        for wish in [Wish::default(), Wish { summary: true, sealed: false }] {
            let response = Response::begun("m", &SamplingParams::default(), Map::new());
            let mut writer = ItemWriter::new("t".to_string(), offered(), wish);
            let mut events = vec![writer.unchanged(&response)];
            for part in parts() {
                events.extend(writer.push(vec![part], Vec::new()));
                events.push(writer.unchanged(&response));
            }
            events.extend(writer.finish("completed"));
            assert_eq!(added_up(events), serde_json::to_value(writer.items()).unwrap());
        }
    }

    #[test]
    fn what_is_cut_off_is_incomplete() {
        let mut writer = ItemWriter::new("t".to_string(), offered(), Wish::default());
        let call = |name: &str| Delta::ToolCall { name: name.to_string() };
        writer.push(vec![call("patch"), Delta::Arguments("{\"input\":\"half".to_string())], Vec::new());
        writer.finish("incomplete");
        let item = serde_json::to_value(&writer.items()[0]).unwrap();
        assert_eq!((&item["input"], &item["status"]), (&json!("half"), &json!("incomplete")));
    }
}
