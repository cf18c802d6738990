package dev.runnerd.client;

import com.google.protobuf.Any;
import com.google.protobuf.ByteString;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.UnknownFieldSet;
import com.google.rpc.BadRequest;
import com.google.rpc.QuotaFailure;
import com.google.rpc.RetryInfo;
import io.grpc.Status;
import io.grpc.protobuf.StatusProto;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;

/**
 * What the server says about a failed call.
 *
 * @param code the status; {@code UNKNOWN} for an error that is not gRPC's
 * @param message for people
 * @param reason the server's stable name of the error, such as "INVALID_REQUEST"; empty when it gave none
 * @param fields the wrong fields of the request, with {@code INVALID_ARGUMENT}
 * @param quotas the quotas that are used up, with {@code RESOURCE_EXHAUSTED}
 * @param retryAfter how long to wait before trying again; empty when the server does not say
 */
public record ErrorDetails(
    Status.Code code,
    String message,
    String reason,
    List<Violation> fields,
    List<Violation> quotas,
    Optional<Duration> retryAfter) {

  /**
   * What is wrong with one field, or which quota is used up.
   *
   * @param subject the field, such as "sampling.top_p", or the quota
   * @param description for people
   */
  public record Violation(String subject, String description) {}

  private static final String ERROR_INFO = "type.googleapis.com/google.rpc.ErrorInfo";

  /** Reads the details of what a stub or a {@link GenerationStream} has thrown, or of an exception around it. */
  public static ErrorDetails of(Throwable error) {
    Status status = Status.fromThrowable(error);
    String message = Optional.ofNullable(status.getDescription()).orElse(String.valueOf(error.getMessage()));
    String reason = "";
    List<Violation> fields = new ArrayList<>();
    List<Violation> quotas = new ArrayList<>();
    Duration retryAfter = null;
    com.google.rpc.Status found = StatusProto.fromThrowable(error);
    try {
      for (Any detail : found == null ? List.<Any>of() : found.getDetailsList()) {
        if (detail.getTypeUrl().equals(ERROR_INFO)) {
          reason = reasonOf(detail.getValue());
        } else if (detail.is(BadRequest.class)) {
          for (BadRequest.FieldViolation one : detail.unpack(BadRequest.class).getFieldViolationsList()) {
            fields.add(new Violation(one.getField(), one.getDescription()));
          }
        } else if (detail.is(QuotaFailure.class)) {
          for (QuotaFailure.Violation one : detail.unpack(QuotaFailure.class).getViolationsList()) {
            quotas.add(new Violation(one.getSubject(), one.getDescription()));
          }
        } else if (detail.is(RetryInfo.class)) {
          com.google.protobuf.Duration delay = detail.unpack(RetryInfo.class).getRetryDelay();
          retryAfter = Duration.ofSeconds(delay.getSeconds(), delay.getNanos());
        }
      }
    } catch (InvalidProtocolBufferException broken) {
      throw new IllegalArgumentException("the error's details cannot be read", broken);
    }
    return new ErrorDetails(
        status.getCode(),
        message,
        reason,
        List.copyOf(fields),
        List.copyOf(quotas),
        Optional.ofNullable(retryAfter));
  }

  /** Reads field 1 of an ErrorInfo. The class itself came only after the release of its library that Debian 12 has. */
  private static String reasonOf(ByteString errorInfo) throws InvalidProtocolBufferException {
    List<ByteString> values = UnknownFieldSet.parseFrom(errorInfo).getField(1).getLengthDelimitedList();
    return values.isEmpty() ? "" : values.get(values.size() - 1).toStringUtf8();
  }
}
