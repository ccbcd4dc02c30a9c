//! A route is declared once, beside its handler: `routes![session_list: Read]`. Method, path and
//! documentation come from the handler's `utoipa::path` attribute; the rule after the colon says
//! which requests reach it. Router and OpenAPI document are made from these declarations.

use axum::{
    Json, Router,
    extract::Request,
    http::{StatusCode, header},
    middleware::{Next, from_fn, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::{MethodFilter, MethodRouter},
};
use harvest_proto::api::Page;
use serde::Serialize;
use tracing::Instrument;
use utoipa::openapi::OpenApi;

use crate::{
    ServerState,
    auth::{self, Guard},
    authorization::Access,
    extract,
    idempotency::{self, Repeat},
    openapi,
    problem::ApiError,
    rate_limit,
};

/// The requests a route accepts and how it runs them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rule {
    pub(crate) access: Access,
    /// Whether the route honours `Idempotency-Key`.
    pub(crate) repeat: Option<Repeat>,
    /// Whether the work ends when the client disconnects.
    cancellable: bool,
    /// Whether the body may hold images.
    takes_images: bool,
}

impl From<Access> for Rule {
    fn from(access: Access) -> Self {
        Self { access, repeat: None, cancellable: false, takes_images: false }
    }
}

impl Access {
    pub(crate) fn idempotent(self, repeat: Repeat) -> Rule {
        Rule { repeat: Some(repeat), ..self.into() }
    }

    pub(crate) fn cancellable(self) -> Rule {
        Rule { cancellable: true, ..self.into() }
    }
}

impl Rule {
    pub(crate) fn taking_images(self) -> Self {
        Self { takes_images: true, ..self }
    }
}

/// One method of one path.
pub(crate) struct Route<S> {
    method: MethodFilter,
    path: String,
    rule: Rule,
    handler: MethodRouter<S>,
}

/// A route before its method and path are known: the handler's name, its rule, and its service.
pub(crate) type Declaration<S> = (&'static str, Rule, fn(MethodFilter) -> MethodRouter<S>);

/// The routes of one or more resources, with their part of the OpenAPI document.
pub(crate) struct Routes<S> {
    pub(crate) document: OpenApi,
    routes: Vec<Route<S>>,
}

/// `routes![handler: rule, …]`, where a rule is an [`Access`] or a [`Rule`].
macro_rules! routes {
    ($($handler:ident: $rule:expr),* $(,)?) => {{
        #[derive(utoipa::OpenApi)]
        #[openapi(paths($($handler),*))]
        struct Handlers;
        $crate::routes::route::Routes::new(
            <Handlers as utoipa::OpenApi>::openapi(),
            &[$((
                stringify!($handler),
                $crate::routes::route::Rule::from($rule),
                |method| axum::routing::on(method, $handler),
            )),*],
        )
    }};
}
pub(crate) use routes;

impl<S: Clone + Send + Sync + 'static> Routes<S> {
    /// Finds each handler's method and path in `document`, whose operations have the handlers'
    /// names as ids, and adds the responses and parameters that follow from its rule.
    pub(crate) fn new(mut document: OpenApi, declarations: &[Declaration<S>]) -> Self {
        let mut routes = Vec::new();
        for (path, item) in &mut document.paths.paths {
            for (method, operation) in openapi::operations(item) {
                let (_, rule, handler) = declarations
                    .iter()
                    .find(|(name, ..)| operation.operation_id.as_deref() == Some(name))
                    .expect("the document was made from these handlers");
                openapi::complete(operation, path, method, rule);
                let handler = handler(method);
                routes.push(Route { method, path: path.clone(), rule: *rule, handler });
            }
        }
        assert_eq!(routes.len(), declarations.len(), "two handlers have the same method and path");
        Self { document, routes }
    }

    pub(crate) fn merge(all: impl IntoIterator<Item = Self>) -> Self {
        let empty = Self { document: OpenApi::default(), routes: Vec::new() };
        all.into_iter().fold(empty, |mut merged, more| {
            merged.document.merge(more.document);
            merged.routes.extend(more.routes);
            merged
        })
    }

    pub(crate) fn with_state<T>(self, state: &S) -> Routes<T> {
        let route = |Route { method, path, rule, handler }| {
            let handler = MethodRouter::with_state(handler, state.clone());
            Route { method, path, rule, handler }
        };
        Routes { document: self.document, routes: self.routes.into_iter().map(route).collect() }
    }

    /// The handlers without middleware.
    pub(crate) fn unguarded(self) -> Router<S> {
        self.routes
            .into_iter()
            .fold(Router::new(), |router, route| router.route(&route.path, route.handler))
    }

    /// The handlers behind the middleware of their rules.
    pub(crate) fn guarded(self, state: &ServerState) -> Router<S> {
        self.routes.into_iter().fold(Router::new(), |router, route| {
            let path = route.path.clone();
            router.route(&path, route.guarded(state))
        })
    }

    #[cfg(test)]
    pub(crate) fn rules(&self) -> impl Iterator<Item = (MethodFilter, &str, Rule)> {
        self.routes.iter().map(|route| (route.method, route.path.as_str(), route.rule))
    }
}

impl<S: Clone + Send + Sync + 'static> Route<S> {
    fn guarded(self, state: &ServerState) -> MethodRouter<S> {
        let (state, rule) = (state.clone(), self.rule);
        let Rule { access, repeat, cancellable, takes_images } = rule;
        let mut handler = self.handler;
        if access == Access::Open {
            return handler.route_layer(from_fn_with_state(state, rate_limit::limit_anonymous));
        }
        if let Some(repeat) = repeat {
            let state = (state.clone(), repeat);
            handler = handler.route_layer(from_fn_with_state(state, idempotency::idempotent));
        }
        let is_safe = [MethodFilter::GET, MethodFilter::HEAD].contains(&self.method);
        if !is_safe && !cancellable {
            handler = handler.route_layer(from_fn(detach_writes));
        }
        if takes_images {
            handler = handler.route_layer(from_fn(extract::allow_images));
        }
        handler.route_layer(from_fn_with_state(Guard { state, access }, auth::require_token))
    }
}

/// 201 Created, with the path of the new resource; of the first one, if there are several.
pub(crate) fn created<T: Serialize>(path: &str, body: &T) -> Response {
    let location = [(header::LOCATION, path)];
    (StatusCode::CREATED, location, Json(body)).into_response()
}

/// A list that fits in one page.
pub(crate) fn page<T>(items: Vec<T>) -> Json<Page<T>> {
    Json(Page { items, next_cursor: None })
}

/// Runs requests that change something to completion, even when the client disconnects: a cancelled
/// handler could leave a stored session without a driver or an idempotency key claimed forever. A
/// stream in the response body still ends with its reader.
async fn detach_writes(request: Request, next: Next) -> Response {
    let work = tokio::spawn(next.run(request).in_current_span());
    work.await.unwrap_or_else(|_| {
        let detail = "the request handler panicked";
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", detail).into_response()
    })
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use axum::{body::Body, routing::post};
    use tokio::sync::Notify;
    use tower_service::Service;

    use super::*;

    #[tokio::test]
    async fn write_completes_after_the_client_disconnects() {
        let (proceed, done) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let (wait, signal) = (Arc::clone(&proceed), Arc::clone(&done));
        let handler = move || async move {
            wait.notified().await;
            signal.notify_one();
        };
        let mut router: Router =
            Router::new().route("/", post(handler)).layer(from_fn(detach_writes));
        let request = Request::builder().method("POST").uri("/").body(Body::empty()).unwrap();
        let response = router.call(request);
        assert!(tokio::time::timeout(Duration::ZERO, response).await.is_err(), "still waiting");
        proceed.notify_one();
        done.notified().await;
    }
}
