//! `harvest token`: creates, lists and revokes access tokens.

use anyhow::{Context, Result};
use harvest_proto::{
    api::{self, Role},
    bridge::Author,
};
use serde_json::json;

use crate::{
    Invocation,
    cli::{CreateTokenArgs, TokenCommand},
    client::Client,
    printer::table,
};

pub(crate) async fn run(ctx: &Invocation, verb: TokenCommand) -> Result<u8> {
    let client = Client::find(&ctx.config)?;
    match verb {
        TokenCommand::Create(args) => create(ctx, &client, args).await?,
        TokenCommand::Ls => {
            let tokens = client.tokens().await?;
            ctx.print.result(&tokens, |tokens| token_table(tokens))?;
            if tokens.iter().all(|token| token.role == Role::Member) {
                let me = client.me().await?;
                ctx.print.note(format!("Only tokens of {}; admins see all", me.user.email));
            }
        }
        TokenCommand::Rm { names } => {
            for name in &names {
                client.token_delete(name).await.with_context(|| format!("cannot revoke {name}"))?;
                ctx.print.note(format!("Revoked {name}"));
            }
            ctx.print.result(&json!({ "revoked": names }), |_| String::new())?;
        }
    }
    Ok(0)
}

async fn create(ctx: &Invocation, client: &Client, args: CreateTokenArgs) -> Result<()> {
    let user = args.user_name.zip(args.email).map(|(name, email)| Author { name, email });
    let role = args.role.map(|role| if role == "admin" { Role::Admin } else { Role::Member });
    let body = api::CreateToken { name: args.name, user, role };
    let created =
        client.token_create(&body).await.with_context(|| format!("cannot create {}", body.name))?;
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

fn token_table(tokens: &[api::Token]) -> String {
    let row = |token: &api::Token| {
        let used = token.last_used.map_or_else(|| "never".to_owned(), |at| at.to_string());
        let user = format!("{} <{}>", token.user.name, token.user.email);
        vec![token.name.clone(), token.role.as_str().to_owned(), used, user]
    };
    table(&["NAME", "ROLE", "LAST USED", "USER"], &tokens.iter().map(row).collect::<Vec<_>>())
}
