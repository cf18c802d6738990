package dev.runnerd.client;

import io.grpc.CallCredentials;
import io.grpc.Metadata;
import io.grpc.SecurityLevel;
import io.grpc.Status;
import java.util.concurrent.Executor;

/**
 * A token that is sent with every call, over TLS alone:
 *
 * <pre>{@code
 * ChannelCredentials tls = TlsChannelCredentials.newBuilder().trustManager(authority).build();
 * ManagedChannel channel =
 *     Grpc.newChannelBuilder(address, CompositeChannelCredentials.create(tls, new BearerToken(token))).build();
 * }</pre>
 *
 * <p>A call over a connection without TLS fails with {@code UNAUTHENTICATED}, and the token stays here.
 */
public final class BearerToken extends CallCredentials {
  static final String NO_TLS = "a token is sent over TLS alone";

  private static final Metadata.Key<String> AUTHORIZATION =
      Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);

  private final String token;

  /** Takes the token's text. */
  public BearerToken(String token) {
    this.token = token;
  }

  @Override
  public void applyRequestMetadata(RequestInfo call, Executor executor, MetadataApplier applier) {
    if (call.getSecurityLevel() != SecurityLevel.PRIVACY_AND_INTEGRITY) {
      applier.fail(Status.UNAUTHENTICATED.withDescription(NO_TLS));
      return;
    }
    Metadata metadata = new Metadata();
    metadata.put(AUTHORIZATION, "Bearer " + token);
    applier.apply(metadata);
  }

  /** Asked for by earlier releases of grpc-java. */
  public void thisUsesUnstableApi() {}
}
