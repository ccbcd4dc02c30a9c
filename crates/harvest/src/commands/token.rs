//! `harvest token`: creates, lists and revokes access tokens.

use anyhow::{Context, Result};
use harvest_proto::{
    api::{self, Role},
    bridge::Author,
};
use reqwest::Method;
use serde_json::json;

use super::ls::age;
use crate::{
    Invocation,
    cli::{CreateTokenArgs, TokenCommand},
    client::{Client, path_segment},
};

pub(crate) async fn run(ctx: &Invocation, verb: TokenCommand) -> Result<u8> {
    let client = Client::find(&ctx.config)?;
    match verb {
        TokenCommand::Create(args) => create(ctx, &client, args).await?,
        TokenCommand::Ls => {
            let tokens: Vec<api::Token> = client.all("/v1/tokens").await?;
            ctx.print.list(&tokens, ["NAME", "ROLE", "LAST USED", "USER…"], row)?;
            if tokens.iter().all(|token| token.role == Role::Member) {
                let me: api::Me = client.get("/v1/me").await?;
                ctx.print.note(format!("Only tokens of {}; admins see all", me.user.email));
            }
        }
        TokenCommand::Rm { names } => {
            for name in &names {
                revoke(&client, name).await.with_context(|| format!("cannot revoke {name}"))?;
                ctx.print.note(format!("Revoked {name}"));
            }
            ctx.print.document(&json!({ "revoked": names }))?;
        }
    }
    Ok(0)
}

async fn create(ctx: &Invocation, client: &Client, args: CreateTokenArgs) -> Result<()> {
    let user = args.user_name.zip(args.email).map(|(name, email)| Author { name, email });
    let role = args.role.map(|role| if role == "admin" { Role::Admin } else { Role::Member });
    let body = api::CreateToken { name: args.name, user, role };
    // Without an idempotency key: the server would store the response, and with it the token.
    let request = client.request(Method::POST, "/v1/tokens").json(&body);
    let created: api::CreatedToken =
        client.call(request).await.with_context(|| format!("cannot create {}", body.name))?;
    ctx.print.result(&created, |created| format!("{}\n", created.value))?;
    let token = &created.token;
    ctx.print.note(format!(
        "Created {} for {} ({}); the value is shown only once",
        token.name,
        token.user.email,
        token.role.as_str()
    ));
    ctx.print.hint(format!("use it with HARVEST_URL={} and HARVEST_TOKEN", client.url()));
    Ok(())
}

async fn revoke(client: &Client, name: &str) -> Result<()> {
    client.delete(&format!("/v1/tokens/{}", path_segment(name)?)).await
}

fn row(token: &api::Token) -> [String; 4] {
    let used = token.last_used.map_or_else(|| "never".to_owned(), age);
    let user = format!("{} <{}>", token.user.name, token.user.email);
    [token.name.clone(), token.role.as_str().to_owned(), used, user]
}
