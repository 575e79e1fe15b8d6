//! Responses that are kept: `GET` and `DELETE /v1/responses/{id}`, its `input_items` and `cancel`.

use axum::Json;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use serde_json::Value;
use utoipa::ToSchema;

use super::response::{Deleted, ItemList, Response};
use super::store::{NotKept, Store};
use crate::app::App;
use crate::error::ApiError;
use crate::openapi;
use crate::path::Id;

/// Items of one page, and the most that may be asked for.
const PAGE: (usize, usize) = (20, 100);

/// Which item comes first.
#[derive(ToSchema)]
#[schema(as = ResponseItemOrder)]
#[serde(rename_all = "snake_case")]
#[allow(dead_code, reason = "it stands in the document alone")]
enum Order {
    Asc,
    Desc,
}

/// The query of a request, as names and values.
type Parameters = Query<Vec<(String, String)>>;

/// Finds a response that is kept.
#[utoipa::path(
    get, path = "/v1/responses/{id}", tag = "OpenAI",
    params(
        ("id" = String, Path, description = "The response's id."),
        ("stream" = Option<bool>, Query, description = "A response that is kept is complete: not true."),
    ),
    security((), ("bearer" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "The response.", body = Response),
        openapi::Known,
    ),
)]
pub async fn get(
    State(app): State<App>,
    Id(id): Id,
    Query(parameters): Parameters,
) -> Result<Json<Value>, ApiError> {
    if parameters.iter().any(|(name, value)| name == "stream" && value == "true") {
        let message = "`stream` may not be true: a response is kept when it is complete; read it whole";
        return Err(ApiError::unsupported("stream", message));
    }
    app.responses.get(&id).map(|kept| Json(kept.response.clone())).ok_or_else(|| unknown(&id))
}

/// Forgets a response.
#[utoipa::path(
    delete, path = "/v1/responses/{id}", tag = "OpenAI",
    params(
        ("id" = String, Path, description = "The response's id."),
    ),
    security((), ("bearer" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "It is gone.", body = Deleted),
        openapi::Known,
    ),
)]
pub async fn delete(State(app): State<App>, Id(id): Id) -> Result<Json<Deleted>, ApiError> {
    if !app.responses.delete(&id) {
        return Err(unknown(&id));
    }
    Ok(Json(Deleted { id, object: "response", deleted: true }))
}

/// Refuses to cancel a response: none runs in the background.
#[utoipa::path(
    post, path = "/v1/responses/{id}/cancel", tag = "OpenAI",
    params(
        ("id" = String, Path, description = "The response's id."),
    ),
    security((), ("bearer" = []), ("x-api-key" = [])),
    responses(
        openapi::Known,
    ),
)]
pub async fn cancel(State(app): State<App>, Id(id): Id) -> Result<Json<Value>, ApiError> {
    app.responses.get(&id).ok_or_else(|| unknown(&id))?;
    let message = "only a response that runs in the background can be cancelled, and Lily has none; close the connection of one that is under way";
    Err(ApiError::plain(StatusCode::BAD_REQUEST, "not_in_background", message))
}

/// Lists all that the model was given, in pages.
#[utoipa::path(
    get, path = "/v1/responses/{id}/input_items", tag = "OpenAI",
    params(
        ("id" = String, Path, description = "The response's id."),
        ("limit" = Option<u32>, Query, description = "Items of a page; 20 where absent.", minimum = 1, maximum = 100),
        ("order" = inline(Option<Order>), Query, description = "The last first where absent."),
        ("after" = Option<String>, Query, description = "The id of the item before the page."),
    ),
    security((), ("bearer" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "A page.", body = ItemList),
        openapi::Known,
    ),
)]
pub async fn input_items(
    State(app): State<App>,
    Id(id): Id,
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
