//! Reasoning that clients hand back: which parts of an item hold it.

use serde_json::Value;

use crate::error::ApiError;
use crate::openai::fields::{Fields, missing};

/// How the content begins that Lily makes. Another server's is unreadable here and passed over.
const MARK: &str = "lily:";

/// A reasoning text as `encrypted_content`. It is not encrypted: it is the client's own conversation.
pub fn sealed(text: &str) -> String {
    format!("{MARK}{text}")
}

/// The text of a `reasoning` item: of the first of its parts that has one.
pub fn text(item: &Fields<'_>) -> Result<String, ApiError> {
    let sealed = item.text("encrypted_content")?.and_then(|content| content.strip_prefix(MARK));
    let content = parts(item, "content", "reasoning_text")?;
    let summary = parts(item, "summary", "summary_text")?;
    let texts = [content, sealed.unwrap_or_default().to_string(), summary];
    Ok(texts.into_iter().find(|text| !text.is_empty()).unwrap_or_default())
}

fn parts(item: &Fields<'_>, name: &str, kind: &str) -> Result<String, ApiError> {
    let list: &[Value] = item.list(name)?.unwrap_or_default();
    let mut text = String::new();
    for (index, part) in list.iter().enumerate() {
        let part = Fields::at(part, format!("{}[{index}]", item.path(name)))?;
        match part.text("type")?.ok_or_else(|| missing(part.path("type")))? {
            found if found == kind => {
                text.push_str(part.text("text")?.ok_or_else(|| missing(part.path("text")))?);
            }
            other => {
                let path = part.path("type");
                let message = format!("`{path}` must be {kind:?}, not {other:?}");
                return Err(ApiError::invalid(path, message));
            }
        }
    }
    Ok(text)
}
