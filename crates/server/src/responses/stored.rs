//! Responses that are kept: `GET` and `DELETE /v1/responses/{id}`, its `input_items` and `cancel`.

use axum::Json;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use serde_json::Value;

use super::response::{Deleted, ItemList};
use super::store::{NotKept, Store};
use crate::app::App;
use crate::error::ApiError;

/// Items of one page, and the most that may be asked for.
const PAGE: (usize, usize) = (20, 100);

/// The query of a request, as names and values.
type Parameters = Query<Vec<(String, String)>>;

/// Handles `GET /v1/responses/{id}`.
pub async fn get(
    State(app): State<App>,
    Path(id): Path<String>,
    Query(parameters): Parameters,
) -> Result<Json<Value>, ApiError> {
    if parameters.iter().any(|(name, value)| name == "stream" && value == "true") {
        let message = "`stream` may not be true: a response is kept when it is complete; read it whole";
        return Err(ApiError::unsupported("stream", message));
    }
    app.responses.get(&id).map(|kept| Json(kept.response.clone())).ok_or_else(|| unknown(&id))
}

/// Handles `DELETE /v1/responses/{id}`.
pub async fn delete(State(app): State<App>, Path(id): Path<String>) -> Result<Json<Deleted>, ApiError> {
    if !app.responses.delete(&id) {
        return Err(unknown(&id));
    }
    Ok(Json(Deleted { id, object: "response", deleted: true }))
}

/// Handles `POST /v1/responses/{id}/cancel`.
pub async fn cancel(State(app): State<App>, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    app.responses.get(&id).ok_or_else(|| unknown(&id))?;
    let message = "only a response that runs in the background can be cancelled, and Lily has none; close the connection of one that is under way";
    Err(ApiError::plain(StatusCode::BAD_REQUEST, "not_in_background", message))
}

/// Handles `GET /v1/responses/{id}/input_items`: all that the model was given, in pages.
pub async fn input_items(
    State(app): State<App>,
    Path(id): Path<String>,
    Query(parameters): Parameters,
) -> Result<Json<ItemList>, ApiError> {
    let parameter = |name: &str| parameters.iter().find(|(key, _)| key == name).map(|(_, value)| &**value);
    let (usual, most) = PAGE;
    let limit = match parameter("limit").map(str::parse) {
        None => usual,
        Some(Ok(limit)) if (1..=most).contains(&limit) => limit,
        Some(_) => {
            return Err(ApiError::invalid("limit", format!("`limit` must lie between 1 and {most}")));
        }
    };
    let mut items = given(&app.responses, &id)?;
    match parameter("order") {
        None | Some("desc") => items.reverse(),
        Some("asc") => {}
        Some(other) => return Err(crate::openai::fields::not_among("order", &["asc", "desc"], other)),
    }
    if let Some(after) = parameter("after") {
        let Some(place) = items.iter().position(|item| item["id"] == after) else {
            let message = format!("`after` is {after:?}, and no item of the response has this id");
            return Err(ApiError::invalid("after", message));
        };
        items.drain(..=place);
    }
    let has_more = items.len() > limit;
    items.truncate(limit);
    let id = |item: Option<&Value>| item.and_then(|item| item["id"].as_str()).map(str::to_string);
    let (first_id, last_id) = (id(items.first()), id(items.last()));
    Ok(Json(ItemList { object: "list", data: items, first_id, last_id, has_more }))
}

/// The items that a response's request gave the model: those before it, and its own.
fn given(store: &Store, id: &str) -> Result<Vec<Value>, ApiError> {
    let chain = store.chain(id).map_err(|NotKept(missing)| unknown(&missing))?;
    let Some((last, before)) = chain.split_last() else { return Ok(Vec::new()) };
    let mut items = Vec::new();
    for kept in before {
        items.extend(kept.items.iter().cloned());
        items.extend(kept.response["output"].as_array().into_iter().flatten().cloned());
    }
    items.extend(last.items.iter().cloned());
    Ok(items)
}

fn unknown(id: &str) -> ApiError {
    let message = format!(
        "there is no response {id:?}; responses are kept in memory, the last few thousand of them, unless `store` is false"
    );
    ApiError::plain(StatusCode::NOT_FOUND, "response_not_found", message)
}
